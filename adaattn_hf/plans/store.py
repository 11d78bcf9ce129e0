"""A plan's files, in a directory or a repository of the Hub, and the tensors of plans in memory, by their hash."""

from __future__ import annotations

import base64
import hashlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .._files import parse_json, write_atomically
from .record import PlanError
from .tensors import LayerTensors

PLAN_FILE, TENSORS_FILE, CARD_FILE = "adaattn_plan.json", "adaattn_plan.safetensors", "README.md"
CONFIG_KEY, CARRIED = "plan", "tensors"
"""Keys of a plan and of its tensors, in base64, in a configuration's settings."""
MOST_BYTES = 1 << 24
"""Largest size of a plan file."""
MOST_CARRIED = 1 << 20
"""Largest size of tensors that are stored in a configuration; larger ones lie only in their file."""
_tensors: dict[str, dict[str, Tensor]] = {}
"""Tensors of plans by their hash, those that were used last at the end."""
_MOST = 64
"""Plans whose tensors are kept."""

P = TypeVar("P", bound="PlanFiles")


class PlanFiles(ABC):
    """Reads and writes a plan: its JSON, the tensors that it names by their hash, and a card.

    Attributes:
        tensors: Hash of the safetensors file, empty without one.
    """

    tensors: str

    @abstractmethod
    def to_json(self) -> str:
        """The plan as JSON."""

    @abstractmethod
    def card(self, repository: str) -> str:
        """What a directory or repository of that name tells people about the plan, in Markdown."""

    @classmethod
    @abstractmethod
    def from_dict(cls: type[P], data: Any) -> P:
        """The plan in JSON data."""

    @classmethod
    def from_pretrained(cls: type[P], source: P | str | Path) -> P:
        """Returns the plan in a file, a directory or a repository of the Hub; a plan is returned as it is.

        In a directory or repository it lies in `adaattn_plan.json`, or else in the `config.json` of a model that
        carries it. The tensors that lie beside it are read, too.

        Args:
            source: Path of a file or directory, id of a repository (`owner/name`), or a plan.

        Raises:
            PlanError: There is no plan, or none that can be read, or its tensors are others than it names.
            TypeError: The source is something else.
        """
        if isinstance(source, cls):
            return source
        if not isinstance(source, (str, Path)):
            raise TypeError(
                f"plan: got {type(source).__name__}, expected a Plan, its file or directory, or an id of the Hub; read "
                "other data with Plan.from_dict"
            )
        path = Path(source)
        file = path if path.is_file() else _beside(source, PLAN_FILE) or _beside(source, "config.json")
        if file is None:
            inside = sorted(str(one.parent) for one in path.glob(f"*/{PLAN_FILE}"))[:3]  # a run for several budgets
            raise PlanError(
                f"{source} {'holds no plan' if path.is_dir() else 'does not exist'}; expected a plan, or a directory "
                f"or repository of the Hub that holds what `adaattn calibrate` wrote{', such as ' * bool(inside)}"
                f"{', '.join(inside)}"
            )
        settings: Mapping[str, Any] = {}
        if file.name == "config.json":
            settings = _settings_of(file)
            if settings.get(CONFIG_KEY) is None:
                raise PlanError(f"{file} carries no plan; make one with `adaattn calibrate`")
            plan = cls.from_dict(settings[CONFIG_KEY])
        else:
            try:
                plan = cls.from_dict(_json(file))
            except PlanError as error:
                raise PlanError(f"{file}: {error}; expected the adaattn_plan.json of `adaattn calibrate`") from error
        if plan.tensors and (held := _held(source, settings)):
            _kept(plan.tensors, held)
        return plan

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the plan, its tensors and, where there is no README.md, a card to a directory.

        Raises:
            PlanError: Its tensors are not in memory.
        """
        place, data = Path(directory), self.tensor_bytes()
        if data is not None:
            write_atomically(place / TENSORS_FILE, data)
        write_atomically(place / PLAN_FILE, self.to_json())
        if not (place / CARD_FILE).exists():
            write_atomically(place / CARD_FILE, self.card(str(directory)))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Uploads the plan, its tensors and a card to a repository of the Hub, which is made where there is none.

        The card of a repository that holds a model stays.

        Args:
            repo_id: `owner/name`.
            private: Whether a new repository is private; None for the owner's default.
            token: Token of the Hub; None for the one that is logged in.

        Returns:
            The address of the commit.

        Raises:
            PlanError: Its tensors are not in memory.
        """
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as place:
            write_atomically(Path(place, CARD_FILE), self.card(repo_id))
            self.save_pretrained(place)
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            rest = [CARD_FILE] if api.file_exists(repo_id, "config.json") else None
            done = api.upload_folder(
                repo_id=repo_id, folder_path=place, commit_message="Upload a plan of attention", ignore_patterns=rest
            )
        return str(done.commit_url)

    def tensor_bytes(self) -> bytes | None:
        """Returns a plan's safetensors file, `None` for a plan without; PlanError if its tensors are not in memory."""
        from safetensors.torch import save

        return save(tensors_of(self)) if self.tensors else None


def remember_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Keeps bases and means in memory, and returns their hash; empty if there are none.

    Those of the plans that were used last are kept; a plan whose tensors are gone needs its file again.
    """
    from safetensors.torch import save

    if not tensors:
        return ""
    name = hashlib.sha256(save(dict(tensors))).hexdigest()
    _use(name, dict(tensors))
    return name


def tensors_of(plan: PlanFiles, source: str | None = None, raw: Any = None) -> dict[str, Tensor]:
    """Returns a plan's tensors: from memory, from their file, or from settings that carry them.

    Raises:
        PlanError: They are nowhere, or others than the plan names.
    """
    if plan.tensors in _tensors:
        return _use(plan.tensors, _tensors[plan.tensors])
    held = _held(source or "", raw)
    if held is None:
        raise PlanError(
            f"the plan needs {TENSORS_FILE}, which is not in {source!r}; copy it beside the weights, or call "
            "adaattn_hf.load_plan(model, directory) with the directory that `adaattn calibrate` wrote"
        )
    return _kept(plan.tensors, held)


def layer_tensors(plan: PlanFiles, index: int, source: str | None, raw: Any) -> LayerTensors:
    """Returns the bases and means of a layer of a plan, and adds those of the plan to a model's settings."""
    tensors = tensors_of(plan, source, raw)
    if isinstance(raw, dict) and raw.get(CARRIED) is None:  # so that they are saved with the model
        data = plan.tensor_bytes()
        if data is not None and len(data) <= MOST_CARRIED:
            raw[CARRIED] = base64.b64encode(data).decode("ascii")
    prefix = f"layers.{index}."
    bases: dict[str, dict[int, Tensor]] = {"query_basis": {}, "key_basis": {}}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            kind, _, head = name.removeprefix(prefix).partition(".")
            if kind in bases:
                bases[kind][int(head)] = tensor
    return LayerTensors(tensors.get(f"{prefix}key_mean"), bases["query_basis"], bases["key_basis"])


def text_file(file: Path) -> str:
    """Returns the text of a plan or report. Raises PlanError if it cannot be read, is too large, or is not text."""
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise PlanError(f"{file} has {size} bytes, expected a plan of at most {MOST_BYTES}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{file} cannot be read ({error.strerror}); give a plan that can") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{file} is no UTF-8 text: {error}; expected a plan as JSON") from error


def _json(file: Path) -> Any:
    text = text_file(file)
    try:
        return parse_json(text)
    except ValueError as error:
        what = file if file.name == "config.json" else "the plan"
        raise PlanError(f"{what} is not JSON: {error}") from error


def _settings_of(config: Path) -> Mapping[str, Any]:
    """Returns this package's settings in a model's `config.json`; PlanError if it is no configuration."""
    data = _json(config)
    settings = data.get("adaattn") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(settings, Mapping | None):
        raise PlanError(f"{config} is no model configuration, expected an object whose adaattn is one, too")
    return settings or {}


def _beside(source: str | Path, name: str) -> Path | None:
    """Returns a file of a directory, beside a file, or of a repository of the Hub; None where it is not there.

    Raises:
        PlanError: The Hub has no such repository, or cannot be reached.
    """
    path = Path(source)
    place = path.parent if path.is_file() else path
    words = str(source)
    if place.is_dir() or place.parent.is_dir() or words.count("/") != 1 or words.startswith((".", "/", "~")):
        return place / name if words and (place / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(words, name))
    except EntryNotFoundError:  # or the Hub is not to be asked, and its cache has none
        return None
    except (OSError, ValueError) as error:
        raise PlanError(f"{words}: its {name} cannot be had from the Hub: {error}") from error


def _held(source: str | Path, raw: Any) -> tuple[bytes, str] | None:
    """Returns the safetensors file beside a plan or model, or in its settings, and where that was; None without one."""
    path = _beside(source, TENSORS_FILE)
    if path is not None:
        return path.read_bytes(), str(path)
    carried = raw.get(CARRIED) if isinstance(raw, Mapping) else None
    if not isinstance(carried, str):
        return None
    try:
        data = base64.b64decode(carried[: 2 * MOST_CARRIED], validate=True)
    except ValueError:
        data = b""  # which has another hash
    return data, f"config.adaattn[{CARRIED!r}]"


def _kept(name: str, held: tuple[bytes, str]) -> dict[str, Tensor]:
    """Keeps the tensors of a file whose hash a plan names. Raises PlanError where it has another."""
    from safetensors.torch import load

    data, where = held
    found = hashlib.sha256(data).hexdigest()
    if found != name:
        raise PlanError(f"{where} has hash {found[:12]}…, the plan names {name[:12]}…; calibrate again")
    return _use(name, load(data))


def _use(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Notes tensors as those that were used last, and forgets those that have not been for long."""
    _tensors.pop(name, None)
    _tensors[name] = tensors
    while len(_tensors) > _MOST:
        del _tensors[next(iter(_tensors))]
    return tensors
