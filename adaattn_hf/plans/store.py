"""A plan's files, in a directory or a repository of the Hub, and the tensors of plans in memory, by their hash."""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from .._files import parse_json
from .record import PlanError
from .tensors import LayerTensors

PLAN_FILE, TENSORS_FILE = "adaattn_plan.json", "adaattn_plan.safetensors"
CONFIG_FILE, CARD_FILE = "config.json", "README.md"
CONFIG_KEY, CARRIED = "plan", "tensors"
"""Keys of a plan and of its tensors, in base64, in a configuration's settings."""
MOST_BYTES = 1 << 24
"""Largest size of a plan file."""
MOST_TENSORS = 1 << 28
"""Largest size of a file of tensors: ten times those of a model of 70B parameters with ranks in every head."""
MOST_CARRIED = 1 << 20
"""Largest size of tensors that are stored in a configuration; larger ones lie only in their file."""
_SUCH = "layers.0.key_mean and layers.0.query_basis.0"
_NAMED = re.compile(r"layers\.(\d{1,4})\.(?:key_mean|(query_basis|key_basis)\.(\d{1,4}))", re.ASCII)
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_tensors: dict[str, dict[str, Tensor]] = {}
"""Tensors of plans by their hash, those that were used last at the end."""
_MOST = 64
"""Plans whose tensors are kept."""
_lock = RLock()


def plan_file(source: str | Path) -> Path:
    """Returns the file that holds a plan, in a directory, a repository of the Hub, or by itself; PlanError if none."""
    path = Path(source)
    try:
        file = path if path.is_file() else _found_in(source, PLAN_FILE) or _found_in(source, CONFIG_FILE)
    except OSError as error:  # a name that is too long, or a directory that may not be entered
        raise PlanError(
            f"plan: got {str(source)!r:.80}, expected one that can be opened ({error.strerror}); give another"
        ) from error
    if file is None:
        inside = sorted(str(plan.parent) for plan in path.glob(f"*/{PLAN_FILE}"))[:3]  # a run for several budgets
        raise PlanError(
            f"plan: {source} {'holds no plan' if path.is_dir() else 'does not exist'}; expected a plan, or a directory "
            f"or repository of the Hub that holds what `adaattn calibrate` wrote{', such as ' * bool(inside)}"
            f"{', '.join(inside)}"
        )
    return file


def carried_in(config: Path) -> Mapping[str, Any]:
    """Returns this package's settings in a model's `config.json`; PlanError if they hold no plan."""
    try:
        data = parse_json(text_file(config))
    except ValueError as error:
        raise PlanError(f"{config} is not JSON: {error}") from error
    settings = data.get("adaattn") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(settings, Mapping | None):
        raise PlanError(f"{config} is no model configuration, expected an object whose adaattn is one, too")
    if settings is None or settings.get(CONFIG_KEY) is None:
        raise PlanError(f"{config} carries no plan; make one with `adaattn calibrate`")
    return settings


def upload(directory: str, repo_id: str, private: bool | None, token: str | None) -> str:
    """Uploads a directory to a repository of the Hub, but no card to a model's; returns the commit's address."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    rest = [CARD_FILE] if api.file_exists(repo_id, CONFIG_FILE) else None
    done = api.upload_folder(
        repo_id=repo_id, folder_path=directory, commit_message="Upload a plan of attention", ignore_patterns=rest
    )
    return str(done.commit_url)


def file_of(tensors: dict[str, Tensor]) -> bytes:
    """Returns the safetensors file of some tensors."""
    return bytes(_safetensors().torch.save(tensors))


def _safetensors() -> Any:
    """The library, once it is needed: a kernel on the Hub imports torch alone."""
    import safetensors.torch

    return safetensors


def remember_tensors(tensors: dict[str, Tensor]) -> str:
    """Keeps bases and means in memory, and returns their hash; empty if there are none.

    Those of the plans that were used last are kept; a plan whose tensors are gone needs its file again.
    """
    name = hashlib.sha256(file_of(tensors)).hexdigest() if tensors else ""
    if tensors:
        _remember(name, dict(tensors))
    return name


def tensors_of(name: str, source: str | None = None, settings: Any = None) -> dict[str, Tensor]:
    """Returns a plan's tensors by their hash: from memory, from their file, or from settings that carry them.

    PlanError: they are nowhere, or others than the plan names.
    """
    with _lock:  # whoever moves them to the end takes them out first
        remembered = _tensors.get(name)
        tensors = None if remembered is None else _remember(name, remembered)
    if tensors is None:
        tensors = read_tensors(name, source or "", settings)
    if tensors is None:
        raise PlanError(
            f"the plan needs {TENSORS_FILE}, which is not in {source!r}; copy it beside the weights, or call "
            "adaattn_hf.load_plan(model, directory) with the directory that `adaattn calibrate` wrote"
        )
    return tensors


def layer_tensors(name: str, index: int, source: str | None, settings: Any) -> LayerTensors:
    """Returns a layer's bases and means of the plan's tensors of that hash, and adds all to a model's settings."""
    tensors = tensors_of(name, source, settings)
    if isinstance(settings, dict) and settings.get(CARRIED) is None:  # so that they are saved with the model
        data = file_of(tensors)
        if len(data) <= MOST_CARRIED:
            settings[CARRIED] = base64.b64encode(data).decode("ascii")
    mean, bases = None, dict[str, dict[int, Tensor]](query_basis={}, key_basis={})
    for key, tensor in tensors.items():
        named = _NAMED.fullmatch(key)
        if named is None:
            raise PlanError(f"{TENSORS_FILE} holds {key!r:.60}, expected names such as {_SUCH}; calibrate again")
        if int(named[1]) != index:
            continue
        if tensor.dtype not in _DTYPES or not bool(tensor.isfinite().all()):
            raise PlanError(f"{key} is {tensor.dtype} or not finite, expected finite numbers; calibrate again")
        if named[2] is None:
            mean = tensor
        else:
            bases[named[2]][int(named[3])] = tensor
    return LayerTensors(mean, bases["query_basis"], bases["key_basis"])


def _read(file: Path, limit: int) -> bytes:
    try:
        size = file.stat().st_size
        if size > limit:
            raise PlanError(f"{file} has {size} bytes, expected a plan of at most {limit}")
        return file.read_bytes()
    except OSError as error:
        raise PlanError(f"{file} cannot be read ({error.strerror}); give a plan that can") from error


def text_file(file: Path) -> str:
    """Returns the text of a plan or report. Raises PlanError if it cannot be read, is too large, or is not text."""
    try:
        return _read(file, MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise PlanError(f"{file} is no UTF-8 text: {error}; expected a plan as JSON") from error


def _found_in(source: str | Path, name: str) -> Path | None:
    path = Path(source)
    folder = path.parent if path.is_file() else path
    words = str(source)
    if folder.is_dir() or folder.parent.is_dir() or words.count("/") != 1 or words.startswith((".", "/", "~")):
        return folder / name if words and (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(words, name))
    except EntryNotFoundError:  # or the Hub is not to be asked, and its cache has none
        return None
    except (OSError, ValueError) as error:
        raise PlanError(f"{words}: its {name} cannot be had from the Hub: {error}") from error


def read_tensors(name: str, source: str | Path, settings: Any) -> dict[str, Tensor] | None:
    """Keeps and returns the tensors beside a plan or model, or in its settings; None where there are none.

    PlanError if they are too large, or have another hash than the plan names, or are no tensors.
    """
    path, carried = _found_in(source, TENSORS_FILE), settings.get(CARRIED) if isinstance(settings, Mapping) else None
    if path is not None:
        data, where = _read(path, MOST_TENSORS), str(path)
    elif isinstance(carried, str):
        where = f"config.adaattn[{CARRIED!r}]"
        try:
            data = base64.b64decode(carried[: 2 * MOST_CARRIED], validate=True)
        except ValueError:
            data = b""  # which has another hash
    else:
        return None
    digest = hashlib.sha256(data).hexdigest()
    if digest != name:
        raise PlanError(f"{where} has hash {digest[:12]}…, the plan names {name[:12]}…; calibrate again")
    try:
        return _remember(name, _safetensors().torch.load(data))
    except (_safetensors().SafetensorError, KeyError) as error:  # KeyError: a dtype that torch has no name for
        raise PlanError(f"{where} is no safetensors file ({error}); calibrate again") from error


def _remember(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with _lock:
        _tensors.pop(name, None)
        _tensors[name] = tensors
        while len(_tensors) > _MOST:
            del _tensors[next(iter(_tensors))]
    return tensors
