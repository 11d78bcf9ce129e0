"""Keys chosen by the query beside windows per head, in plain torch: `python studies/kept_pages.py MODEL GGUF TEXTS OUT LENGTH SECONDS`.

Pages of 64 keys. Page 0 and a block's last 128 keys are always read. A choice is made per block of rows:
* windows: a head reads the smallest window whose mean lost mass on another text of the kind is at most eps;
* lag b: a block of b rows reads the heaviest pages by the mean mass of the b rows before it (so that nothing later
  decides), all but those that together hold at most t; t per head, calibrated on the other text so that the real mean
  loss is at most eps;
* group lag b: the same with one set of pages for all heads of a key/value head.
"""
import json, math, sys, time
from pathlib import Path
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

MODEL, GGUF, TEXTS, OUT, LENGTH, LIMIT = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
DEVICE = torch.device(sys.argv[7] if len(sys.argv) > 7 else "cuda")
ROWS, PAGE, NEAR, SKIP = 512, 64, 128, 1024
SEQUENCES = 6
GRID = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
METHODS = {"windows": None, "lag 128": (128, False), "lag 64": (64, False), "lag 32": (32, False), "group lag 128": (128, True), "group lag 32": (32, True)}
TARGETS = (0.006, 0.012, 0.024)

def heavy(mass, fixed, allowed):
    """Pages to keep: all but the lightest, which together hold at most `allowed`; fixed pages stay. mass: [..., pages]."""
    light, order = mass.masked_fill(fixed, math.inf).sort(-1)
    return torch.ones_like(mass, dtype=torch.bool).scatter_(-1, order, light.cumsum(-1) > allowed) | fixed

class Run:
    def __init__(self, method="exact", settings=None, table=None):
        self.method, self.settings, self.table = method, settings, table
        self.kept = torch.zeros((), dtype=torch.float64, device=DEVICE); self.there = 0; self.lost = torch.zeros((), dtype=torch.float64, device=DEVICE); self.rows = 0
        self.layers_kept = {}

    def fixed(self, start, rows, block, pages):
        """[blocks, pages]: page 0 and those of the last NEAR keys before a block's end; also which pages it sees at all."""
        ends = torch.arange(start + block, start + rows + 1, block, device=DEVICE)[:, None]
        page = torch.arange(pages, device=DEVICE)[None]
        seen = page * PAGE < ends
        return ((page == 0) | (page >= (ends - block - NEAR) // PAGE)) & seen, seen

    def attention(self, module, q, k, v, mask=None, scaling=None, **_):
        layer, heads, length = module.layer_idx, q.shape[1] // k.shape[1], q.shape[2]
        out = torch.empty(1, length, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device)
        for g in range(k.shape[1]):
            mine = slice(g * heads, (g + 1) * heads)
            keys, last = k[0, g].float(), None
            for start in range(0, length, ROWS):
                n = start + ROWS; pages = n // PAGE
                s = torch.matmul(q[0, mine, start:n].float() * scaling, keys[:n].t())
                s[:, :, start:].masked_fill_(torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).triu(1), -math.inf)
                p = torch.softmax(s, -1); del s
                mass = p.view(heads, ROWS, pages, PAGE).sum(-1)
                if self.table is not None and n > SKIP and (start // ROWS) % 4 == 3:
                    self.probe(layer, mine, start, mass, last)
                keep, block = self.choose(layer, mine, start, mass, last)
                if keep is not None:
                    p.view(heads, ROWS // block, block, pages, PAGE).mul_(keep[:, :, None, :, None])
                    total = (mass.view(heads, ROWS // block, block, pages) * keep[:, :, None]).sum(-1).view(heads, ROWS, 1)
                else:
                    total = mass.sum(-1, keepdim=True)
                out[0, start:n, mine] = (torch.matmul(p.to(v.dtype), v[0, g, :n]).float() / total).transpose(0, 1).to(out.dtype)
                last = mass[:, -128:]
        return out, None

    def lagged(self, block, grouped, mass, last):
        """Mean mass of the rows before each block: [heads or 1, blocks, pages]."""
        heads, rows, pages = mass.shape
        before = torch.cat([torch.nn.functional.pad(last[:, -block:], (0, pages - last.shape[-1])), mass[:, :-block]], 1)
        found = before.view(heads, rows // block, block, pages).mean(2)
        return found.mean(0, keepdim=True) if grouped else found

    def choose(self, layer, mine, start, mass, last):
        heads, rows, pages = mass.shape
        if self.method == "exact" or last is None:
            return None, None
        how = METHODS[self.method]
        block, grouped = how or (128, False)
        fixed, seen = self.fixed(start, rows, block, pages)
        setting = self.settings[layer, mine]
        if how is None:
            ends = torch.arange(start + block, start + rows + 1, block, device=DEVICE)[:, None]
            page = torch.arange(pages, device=DEVICE)[None]
            keep = fixed[None] | (page[None] >= (ends[None] - block - setting[:, None, None] * PAGE) // PAGE)
        else:
            allowed = setting[:1] if grouped else setting
            keep = heavy(self.lagged(block, grouped, mass, last), fixed[None], allowed[:, None, None]).expand(heads, -1, -1)
        keep = keep & seen[None]
        self.kept += keep.sum(); self.there += int(seen.sum()) * heads
        left = (mass.view(heads, rows // block, block, pages) * ~keep[:, :, None]).sum()
        self.lost += left; self.rows += heads * rows
        return keep, block

    def probe(self, layer, mine, start, mass, last):
        """Of an exact pass: what each setting keeps and really loses, per head."""
        heads, rows, pages = mass.shape
        for name, how in METHODS.items():
            block, grouped = how or (128, False)
            fixed, seen = self.fixed(start, rows, block, pages)
            per = mass.view(heads, rows // block, block, pages).mean(2)
            if how is None:
                away = ((torch.arange(start, start + rows, block, device=DEVICE)[:, None] - torch.arange(pages, device=DEVICE)[None] * PAGE) // PAGE)
                for w in WINDOWS:
                    keep = (fixed | (away <= w)) & seen
                    self.note(name, w, layer, mine, keep[None].expand(heads, -1, -1), seen, per)
            else:
                by = self.lagged(block, grouped, mass, last)
                light, order = by.masked_fill(fixed[None], math.inf).sort(-1)
                sums = light.cumsum(-1)
                for t in GRID:
                    keep = (torch.ones_like(by, dtype=torch.bool).scatter_(-1, order, sums > t) | fixed[None]) & seen[None]
                    self.note(name, t, layer, mine, keep.expand(heads, -1, -1), seen, per)

    def note(self, name, setting, layer, mine, keep, seen, per):
        t = self.table.setdefault((name, setting), torch.zeros(4, *SHAPE, dtype=torch.float64, device=DEVICE))
        t[0, layer, mine] += keep.sum((1, 2)); t[1, layer, mine] += seen.sum()
        t[2, layer, mine] += (per * ~keep).sum((1, 2)); t[3, layer, mine] += per.shape[1]

def settings(table, name, eps):
    """Per head the cheapest setting whose real mean loss on the other text is at most eps; nothing left out where none is."""
    keys = [key for key in table if key[0] == name]
    t = torch.stack([table[key] for key in keys])
    if METHODS[name] and METHODS[name][1]:  # one set for the heads of a group: its mean loss decides
        t = t.view(*t.shape[:3], GROUPS, -1).mean(-1, keepdim=True).expand(*t.shape[:3], GROUPS, SHAPE[1] // GROUPS).reshape(t.shape)
    share = torch.where(t[:, 2] / t[:, 3] <= eps, t[:, 0] / t[:, 1], 2.0)
    best = share.argmin(0)
    values = torch.tensor([float(key[1]) for key in keys], device=DEVICE)[best]
    none = 1e6 if METHODS[name] is None else -1.0
    found = torch.where(share.amin(0) < 1, values, none)
    return found.long() if METHODS[name] is None else found

def forward(model, ids, run):
    AttentionInterface.register("kept_pages", run.attention)
    AttentionMaskInterface.register("kept_pages", lambda *a, **k: None)
    model.set_attn_implementation("kept_pages")
    return model.model(ids, use_cache=False).last_hidden_state[0]

def log_probs(model, hidden):
    head = model.lm_head.weight
    for i in range(SKIP, len(hidden) - 1, 1024):
        yield i, (hidden[i:min(i + 1024, len(hidden) - 1)] @ head.t()).float().log_softmax(-1)

@torch.no_grad()
def main():
    global SHAPE, GROUPS, WINDOWS
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(MODEL, **({"gguf_file": GGUF} if GGUF != "-" else {}), dtype=torch.bfloat16, attn_implementation="sdpa").to(DEVICE).eval()
    tok = AutoTokenizer.from_pretrained(MODEL, **({"gguf_file": GGUF} if GGUF != "-" else {}))
    print(f"loaded in {time.perf_counter() - began:.0f} s", flush=True)
    c = model.config
    SHAPE, GROUPS = (c.num_hidden_layers, c.num_attention_heads), c.num_key_value_heads
    WINDOWS = sorted({round(1.3 ** i) for i in range(40) if 1.3 ** i <= LENGTH / PAGE})
    texts = {}
    for kind in ("prose", "code"):
        for part in ("other", "measured"):
            texts[kind, part] = tok((TEXTS / f"{kind}_{part}.txt").read_text(errors="ignore"), return_tensors="pt").input_ids[0]
            print(kind, part, len(texts[kind, part]), flush=True)
    tables = {}
    for kind in ("prose", "code"):
        table = {}
        forward(model, texts[kind, "other"][None, :LENGTH].to(DEVICE), Run(table=table))
        tables[kind] = table
        print(f"{kind}: calibrated, {time.perf_counter() - began:.0f} s", flush=True)
    points = open(OUT, "a")
    for number in range(SEQUENCES):
        for kind in ("prose", "code"):
            ids = texts[kind, "measured"]
            if (number + 1) * LENGTH > len(ids):
                continue
            ids = ids[None, number * LENGTH:(number + 1) * LENGTH].to(DEVICE)
            gold = ids[0, 1:]
            exact, nll = [], []
            hidden = forward(model, ids, Run())
            for i, lp in log_probs(model, hidden):
                exact.append(lp.half()); nll.append(-lp.gather(1, gold[i:i + len(lp), None])[:, 0])
            for eps in TARGETS:
                for name in METHODS:
                    run = Run(name, settings(tables[kind], name, eps))
                    kl, more = [], []
                    for (i, lq), lp, base in zip(log_probs(model, forward(model, ids, run)), exact, nll):
                        lp = lp.float(); lp -= lp.logsumexp(-1, keepdim=True)
                        more.append(-lq.gather(1, gold[i:i + len(lq), None])[:, 0] - base)
                        kl.append((lp.exp() * (lp - lq)).sum(-1))
                    print(json.dumps(dict(kind=kind, sequence=number, length=LENGTH, method=name, eps=eps, kl=float(torch.cat(kl).mean()), dnll=float(torch.cat(more).mean()), nll=float(torch.cat(nll).mean()), read=float(run.kept) / run.there, lost=float(run.lost) / run.rows)), file=points, flush=True)
                if time.perf_counter() - began > LIMIT:
                    print("time is up", flush=True); return
            print(f"{kind} {number}: {time.perf_counter() - began:.0f} s", flush=True)

main()
