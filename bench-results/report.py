"""Writes the tables and plots that the rows of this folder give, and checks the sentences that quote them.

    python3 bench-results/report.py            # rewrites tables and plots in README.md and book/src
    python3 bench-results/report.py --check    # writes nothing; names what is not what the rows say

A table stands between `<!-- bench-report: NAME -->` and `<!-- /bench-report: NAME -->`; the function of that name below
makes it. Sentences are written by hand. A comment behind a paragraph or a list item says where its figures come from:

    <!-- row:
    2.0 = h200/first-call.json.rows[driver_cache=false, cubecl_cache=false].forward_seconds
    89 = max(h200/step.json.rows[implementation=burn].parameters) / 1e6
    -->

On the left is a figure as the paragraph writes it, on the right a file, then keys (`.key`) and conditions on the rows
(`[key=value, key!=value]`), or arithmetic on such values; `min`, `max` and `mean` take several rows.
"""

import csv
import json
import math
import re
import sys
from functools import cache
from pathlib import Path
from statistics import fmean, variance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "book"))

from figures import log_chart  # noqa: E402


@cache
def load(name):
    text = (HERE / name).read_text()
    if name.endswith(".tsv"):
        return list(csv.DictReader(text.splitlines(), delimiter="\t"))
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def has(row, want):
    return all(row.get(key) == value for key, value in want.items())


def rows(name, **want):
    """The rows of a file with these values."""
    found = load(name)
    return [row for row in (found if isinstance(found, list) else found["rows"]) if has(row, want)]


def value(name, key, **want):
    """What the one row with these values has, or None if there is no such row."""
    found = rows(name, **want)
    if len(found) > 1:
        raise ValueError(f"{name}: {len(found)} rows with {want}")
    for part in key.split("."):
        found = [row[part] for row in found]
    return found[0] if found else None


def distinct(values):
    return list(dict.fromkeys(values))


# Figures of sentences.
LOOKUP = re.compile(r"([\w./-]+\.(?:jsonl|json|tsv))((?:\[[^\]]*\]|\.\w+)+)")
OVER = {"min": min, "max": max, "mean": fmean}
ARITHMETIC = re.compile(rf"(?:[\d.,e+*/()\[\] -]|{'|'.join(OVER)})+")


def satisfies(row, condition):
    key, differs, wanted = re.fullmatch(r"\s*(\w+)(!?)=(.*?)\s*", condition).groups()
    found = row.get(key)
    return ((found if isinstance(found, str) else json.dumps(found)) == wanted) != bool(differs)


def looked_up(name, path):
    """All values at a path, e.g. `.rows[a=1, b=x].ms.median`."""
    found = [load(name)]
    for conditions, key in re.findall(r"\[([^\]]*)\]|\.(\w+)", path):
        if key:
            found = [entry[int(key) if isinstance(entry, list) else key] for entry in found]
        else:
            found = [row for entry in found for row in entry if all(satisfies(row, c) for c in conditions.split(","))]
    if not found:
        raise ValueError(f"no row {name}{path}")
    return found if len(found) > 1 else found[0]


def evaluated(expression):
    """What the right side of a comment's line says: the text of a row, or a number."""
    whole = LOOKUP.fullmatch(expression)
    if whole and isinstance(text := looked_up(*whole.groups()), str):
        return text
    text = LOOKUP.sub(lambda match: repr(looked_up(*match.groups())), expression)
    if not ARITHMETIC.fullmatch(text):
        raise ValueError(f"not a figure: {text}")
    names = {name: lambda found, of=of: of(found if isinstance(found, list) else [found]) for name, of in OVER.items()}
    return eval(text, {"__builtins__": {}, **names})


def agrees(written, found):
    """Whether a figure is this number, in as many digits as it has."""
    if isinstance(found, str):
        return written == found
    number = written.replace("−", "-").replace(" ", "")
    unit = 10.0 ** -len(number.partition(".")[2])
    return abs(float(number) - found) <= unit / 2 * (1 + 1e-6)


def sentence_faults(name, text):
    """What is wrong with the figures of a page."""
    faults, end = [], 0
    for comment in re.finditer(r"<!-- row:(.*?)-->", text, re.DOTALL):
        before, end = text[end : comment.start()].rstrip(), comment.end()
        paragraph = " ".join(before[before.rfind("\n\n") + 1 :].split())
        for line in comment[1].strip().splitlines():
            written, _, expression = (part.strip() for part in line.partition(" = "))
            try:
                if not re.search(rf"(?<![\w.]){re.escape(written)}(?!\w|\.\d)", paragraph):
                    faults.append(f"{name}: {written} does not stand before its comment: {expression}")
                elif not agrees(written, found := evaluated(expression)):
                    faults.append(f"{name}: {written} is {found} in {expression}")
            except Exception as error:  # whatever a comment that is no expression leads to
                faults.append(f"{name}: `{line.strip()}`: {type(error).__name__} {error}")
    return faults


# Cells.
def table(head, lines):
    text = [["–" if cell is None else str(cell) for cell in line] for line in (head, *lines)]
    text = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in text]
    return "\n".join([text[0], "|" + "---|" * len(head), *text[1:]])


def ms(x):
    """Three significant digits, at most four behind the point."""
    return None if x is None else f"{x:.{min(4, max(0, 2 - math.floor(math.log10(x))))}f}"


def theirs(ours, peer):
    """A peer's time, and ours over it."""
    return peer and f"{ms(peer)} ({ours / peer:.2f}×)"


def rate(x):
    return x and (f"{x:.1f}" if x < 10 else f"{x:.0f}")


def thousands(n):
    return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 1024}K" if n % 1024 == 0 else str(n)


# Attention on a GPU.
PASSES = ("forward", "backward")
PEERS = {"FlashAttention-2": "sdpa-flash dense", "cuDNN": "sdpa-cudnn dense"}
HEADS = {"layer": ("32/8", 128), "few": ("32/8", 128), "small": ("2/1", 64), "wide": ("8/2", None)}


def parsed(name):
    """Heads, their width, the numbers by their letters and the other words of `layer-n32k-w2048-f32`."""
    family, *parts = name.split("-")
    found = [re.fullmatch(r"([bcdmnqw])(\d+)([km]?)", part) for part in parts]
    numbers = {part[1]: int(part[2]) * {"": 1, "k": 2**10, "m": 2**20}[part[3]] for part in found if part}
    words = [part for part, number in zip(parts, found) if not number and part != "dense"]
    return HEADS[family][0], numbers.get("d", HEADS[family][1]), numbers, words


def kept(numbers, everything):
    return f"w {numbers['w']}" if "w" in numbers else everything


def described(name):
    heads, d, n, words = parsed(name)
    queries = f", {n['q']} quer{'y' if n['q'] == 1 else 'ies'}" if "q" in n else ""
    words = [word if word == "f32" else f"scores {word}" for word in words]
    return ", ".join([f"N {thousands(n['n'])}{queries}", kept(n, "dense"), f"H {heads}, D {d}", *words])


def bench(name, phase, key="ms.median"):
    return value("h200/wgmma.json", key, workload=name, phase=phase)


def dense_peer(name, peer, phase):
    heads, d, n, words = parsed(name)
    case, phase = f"B1 H{heads} Q{n.get('q', n['n'])} K{n['n']} D{d} ", "bwd" if phase == "backward" else "fwd"
    found = rows("h200/peers.jsonl", peer=PEERS[peer], phase=phase)
    return next((row["ms"] for row in found if row["case"].startswith(case) and not words), None)


def workloads(file="h200/wgmma.json"):
    return distinct(row["workload"] for row in rows(file))


def peers():
    lines = []
    for name in workloads():
        line = [described(name)]
        for phase in ("end-to-end", "backward"):
            ours = bench(name, phase)
            line += [ms(ours), *(theirs(ours, dense_peer(name, peer, phase)) for peer in PEERS)]
        lines += [line] if line[2] else []
    return table(["", "forward: ours", *PEERS, "backward: ours", *PEERS], lines)


def parts():
    lines = []
    for name in workloads():
        line = [described(name), ms(bench(name, "select")), ms(bench(name, "lists"))]
        for phase in PASSES:
            line += [ms(bench(name, phase)), rate(bench(name, phase, "tflops")), f"{bench(name, phase, 'roof_percent'):.0f} %"]
        lines.append([*line, ", ".join(f"{bench(name, 'forward', key):.0f}" for key in ("peak_mib", "workspace_mib"))])
    of = ["TFLOP/s", "of the roof"]
    return table(["", "selection", "key lists", "forward", *of, "backward", *of, "peak MiB, of it workspace"], lines)


def engines():
    timed = {}
    for file in ("portable-bf16", "mma", "wgmma"):  # of two rows the later one counts
        timed |= {(row["workload"], row["phase"], row["engine"]): row["ms"]["median"] for row in rows(f"h200/{file}.json")}
    columns = [(phase, engine) for phase in PASSES for engine in ("wgmma", "mma", "portable")]
    columns += [("backward-deterministic", engine) for engine in ("wgmma", "mma")]
    lines = [[described(name), *(ms(timed.get((name, *column))) for column in columns)] for name in workloads()]
    return table(["", *(f"{phase}: `{engine}`" for phase, engine in columns)], [line for line in lines if any(line[2:4])])


def decode():
    file, lines = "h200/decode.json", []
    for name in workloads(file):
        heads, d, n, _ = parsed(name)
        batch, tokens = n.get("b", 1), f"{n['m']} tokens, " if "m" in n else ""
        line = [f"{tokens}context {thousands(n['c'])}, {kept(n, 'every key')}, B {batch}, H {heads}, D {d}"]
        case, ours = f"B{batch} H{heads} K{n['c']} D{d}", value(file, "ms.median", workload=name, phase="decode")
        line += [ms(ours), ms(value(file, "graph_ms.median", workload=name, phase="decode"))]
        found = [value("h200/peers-decode.jsonl", "ms_row", case=case, peer=peer) for peer in ("flash", "cudnn")]
        line += [None if tokens else theirs(ours, peer) for peer in found]
        lines.append([*line, ms(value(file, "ms.median", workload=name, phase="append"))])
    return table(["step", "ours", "in a replayed graph", *PEERS, "append"], lines)


def masks():
    lines = []
    for case in distinct(row["case"] for row in rows("h200/masks.json")):
        found = [value("h200/masks.json", "ms.median", case=case, phase=p) for p in ("plan", "plan-ranges", *PASSES)]
        want = {"N": parsed(f"layer-{case}")[2]["n"], "peer": "cudnn", "mask": "causal"}
        dense = [value("h200/peers-masks.jsonl", "ms", phase=phase, **want) for phase in PASSES]
        lines.append([f"`{case}`", *map(ms, found), *map(theirs, found[2:], dense)])
    return table(["", "plan", "plan from ranges", *PASSES, "cuDNN, dense: forward", "backward"], lines)


# On a CPU, and the README's table.
def cpu():
    file, columns, lines = "cpu/cpu-vs-flex.json", ("ours_cpu_ms", "flex_cpu_ms", "cpu_ratio"), []
    for row in rows(file, phase="forward"):
        line = [f"N {row['n']}, w {row['w']}"]
        for phase in ("forward", "forward+backward"):
            ours, flex, times = (value(file, key, n=row["n"], w=row["w"], phase=phase) for key in columns)
            line += [ms(ours), ms(flex), rate(times)]
        lines.append(line)
    return table(["", "forward: ours", "Flex", "times as fast", "and backward: ours", "Flex", "times as fast"], lines)


def attention():
    lines = []
    for name in ("layer-n8k-w2048", "layer-n32k-w2048", "layer-n128k-w2048", "layer-n16k-dense", "small-n32k-w1024"):
        heads, d, n, _ = parsed(name)
        ours = [bench(name, phase) for phase in ("end-to-end", "backward")]
        cudnn = [dense_peer(name, "cuDNN", phase) for phase in PASSES]
        what = f"{thousands(n['n'])} tokens, {kept(n, '**dense**')}, {heads} heads of {d}"
        pairs = ((ours[0], cudnn[0]), (sum(ours), sum(cudnn)))
        lines.append([what, *(f"{ms(ours)} / {theirs(ours, cudnn)}" for ours, cudnn in pairs)])
    return table(["", "forward", "forward and backward"], lines)


# Tokens of a sequence, sequences, window, whether checkpointed; then the run by its number and our commit.
STEPS = [
    (32768, 1, 2048, False, 4, "98ca7be"),
    (32768, 1, 2048, False, 1, "888fcb2"),
    (32768, 1, 2048, True, 2, "f4c1521"),
    (32768, 1, None, False, 2, "76fb061"),
    (32768, 1, None, False, 1, "888fcb2"),
    (8192, 4, 1024, False, 4, "98ca7be"),
    (4096, 8, 1024, False, 4, "98ca7be"),
    (131072, 1, 2048, False, 2, "76fb061"),
    (131072, 1, 2048, True, 2, "76fb061"),
]
PLAIN = [STEPS[0], *STEPS[5:8]]  # the newest run of each length, without dense attention and checkpoints
TORCH = ("PyTorch, compiled", "PyTorch, eager")


@cache
def step_rows():
    """The rows of builds without autotune, each with whose it is and the commit that it ran beside: a peer's follow ours."""
    found, commit = [], None
    for row in rows("h200/step.json", what="model", layers=8, d_model=1024):
        commit = row.get("commit") or commit
        whose = {"compiled": TORCH[0], "eager": TORCH[1]}.get(row["implementation"].split()[-1], "ours")
        found += [] if row.get("autotune") else [{**row, "whose": whose, "beside": commit}]
    return found


def steps(whose, seq, batch, window, checkpoint, run=None, commit=None):
    """Ours of a setting; a peer attends densely and keeps everything."""
    want = {"whose": whose, "seq": seq, "batch": batch}
    want |= {"window": window, "checkpoint": checkpoint} if whose == "ours" else {}
    want |= {"run": run, "beside": commit} if run else {}
    return [row for row in step_rows() if has(row, want)]


def mean(values):
    return fmean(found) if (found := list(values)) else None


def step_line(setting):
    """Ours, bold if it has a peer and no peer is faster, and the peers'."""
    ours, *found = (mean(row["step_ms"]["median"] for row in steps(whose, *setting)) for whose in ("ours", *TORCH))
    wins = any(found) and all(ours < peer for peer in found if peer)
    return [sequences(setting), f"**{ms(ours)}**" if wins else ms(ours), *(theirs(ours, peer) for peer in found)]


def sequences(setting):
    seq, batch, window, checkpoint = setting[:4]
    name = f"{f'{batch} × ' if batch > 1 else ''}{thousands(seq)} tokens, {f'w {window}' if window else 'dense'}"
    return f"{name}, checkpointed" if checkpoint else name


COMPILED = "torch 2.11.0+cu130 compiled"

# The settings of the layer's default that README shows: tokens of a sequence, sequences, window.
DEFAULT = [(32768, 1, 2048), (8192, 4, 1024), (4096, 8, 1024)]


def step():
    """The newest run of the layer's default, beside PyTorch's compiled sliding window with the same local layers."""
    def time(implementation, **want):
        found = rows("h200/step-default.json", run=6, implementation=implementation, d_model=1024, **want)
        return mean(row["step_ms"]["median"] for row in found)

    lines = []
    for seq, batch, window in DEFAULT:
        setting = {"seq": seq, "batch": batch, "window": window}
        ours = time("burn", **setting)
        lines.append([sequences((seq, batch, window, False)), ms(ours), theirs(ours, time(COMPILED, **setting))])
    return table(["", "ours", "PyTorch, sliding window"], lines)


def times():
    return table(["sequences of tokens", "ours", *TORCH, "commit"], [[*step_line(s), f"`{s[-1]}`"] for s in STEPS])


def memory():
    def peak(whose, *setting):
        found = mean(row["peak_bytes"] / 1e9 for row in steps(whose, *setting))
        return found and f"{found:.1f}"

    checked, lines = {setting[:3]: setting for setting in STEPS if setting[3]}, []
    for setting in PLAIN:
        again = checked.get(setting[:3])
        again = again and f"{peak('ours', *again)} (`{again[-1]}`)"
        found = [f"**{peak('ours', *setting)}**", again, *(peak(peer, *setting[:4]) for peer in TORCH)]
        lines.append([f"{sequences(setting)} (`{setting[-1]}`)", *found])
    return table(["reserved memory, GB", "ours", "ours, checkpointed", *TORCH], lines)


KINDS = {"attention": "attention", "product": "matrix products", "norm": "norms and rotary encoding",
         "element_wise": "element by element, reductions", "reduction": "element by element, reductions",
         "optimiser": "clipping and AdamW", "copy": "copies and casts"}  # fmt: skip


def kinds():
    columns = [steps("ours", *STEPS[0]), steps(TORCH[0], *STEPS[0]), steps(TORCH[1], *STEPS[1])]
    columns = [[row["profile"] for row in column if row["profile"]] for column in columns]
    lines = {name: [] for name in (*KINDS.values(), "look-ups and others", "all", "launches")}
    for column in columns:
        found = dict.fromkeys(lines, 0.0)
        for kind, of in ((kind, of["ms"] / len(column)) for profile in column for kind, of in profile["kinds"].items()):
            found[KINDS.get(kind, "look-ups and others")] += of
            found["all"] += of
        found["launches"] = fmean(profile["launches"] for profile in column)
        for name, line in lines.items():
            line.append(f"{found[name]:.{name != 'launches':d}f}")
    head = [f"ours, `{STEPS[0][-1]}`", TORCH[0], f"{TORCH[1]} (beside `{STEPS[1][-1]}`)"]
    return table(["kind, ms", *head], [[name, *line] for name, line in lines.items()])


def products():
    def maker(candidate):
        ours = None if candidate.startswith("wgmma") else ", the fastest of CubeK's routines"
        return {"rule": "", "standard": ", as Burn takes it without autotune"}.get(candidate, ours)

    found, parts = {}, ("forward", "input", "weight")
    for row in rows("h200/products.json", before=None):
        newest = row["candidate"] != "rule" or row.get("run") == 2
        if newest and maker(row["candidate"]) is not None and row["tflops"]:
            line = found.setdefault(row["layer"] + maker(row["candidate"]), {})
            line[row["pass"]] = max(row["tflops"], line.get(row["pass"], 0))
    ours_first = sorted(found.items(), key=lambda line: "," in line[0])
    lines = [[name, *(rate(line.get(part)) for part in parts)] for name, line in ours_first]
    return table(["TFLOP/s", "forward", "gradient of the input", "gradient of the weight"], lines)


# The tutorial.
def pivot(name, line, column, columns, cell):
    """A line for each value of a key, with a cell for each value of another."""
    names = distinct(row[line] for row in rows(name))
    found = {key: [rows(name, **{line: key, column: c}) for c in columns] for key in names}
    return [[key, *(cell(*of) if of else None for of in cells)] for key, cells in found.items()]


def right(row):
    return f"{100 * row['right']:.1f} %"


def arms():
    file, called, lines = "learning/tutorial-cpu.json", {"zoh": "zoh (the paper's form)", "random": "noise"}, []
    for arm, *cells in pivot(file, "arm", "seed", (9, 10, 11), right):
        seconds = [f"{row['seconds']:.0f}" for row in sorted(rows(file, arm=arm), key=lambda row: row["seconds"])]
        sizes = [str(rows(file, arm=arm)[0][key]) for key in ("window", "runners_up")]
        lines.append([called.get(arm, arm), *sizes, *cells, "–".join(distinct((seconds[0], seconds[-1])))])
    return table(["scores", "window", "runners-up", "seed 9", "10", "11", "seconds a run"], lines)


def small():
    file = "learning/tutorial-small.json"
    return table([load(file)["model"], "seed 3", "4", "5"], pivot(file, "setting", "seed", (3, 4, 5), right))


# What the default layer learns, beside dense attention and the last keys. A seed does not make two runs alike on a GPU,
# so runs of two arms are not paired by it.
LEARNED = "learning/default-h200.json", "learning/grid-h200.json"
LOCAL = "learning/language-text-local.json"

# Quantiles of Student's distribution for 95 %, by degrees of freedom.
STUDENT = {2: 4.303, 4: 2.776, 6: 2.447, 7: 2.365}

# Choices of a run of the default layer. Two come with the task: recall has texts that begin short, facts windows that
# begin wide.
CHOICES = {"recent": None, "turns": None, "runners_up": None, "dense_layers": [], "layout": "scattered"}
CHOICES |= dict.fromkeys(("without_recency", "with_tokens", "without_kept", "without_compete", "sink"), False)


def runs(task, arm):
    """Runs of the default layer, or of an arm that has no use for its choices, by their seeds."""
    found = [row for name in LEARNED[: 1 if arm == "ours" else 2] for row in rows(name, task=task, arm=arm)]
    for row in found:
        other = [key for key, value in CHOICES.items() if row.get(key, value) != value]
        if other:
            raise ValueError(f"{task}, {arm}, seed {row['seed']}: not the default layer: {other}")
    return sorted(found, key=lambda row: row["seed"])


def sliding():
    """Runs of the last keys in place of the best ones, and of dense attention beside them, of the same model."""
    place = {"kv_heads": 8, "steps": 3000, "positions": {"rope-in-local-layers": {"window": 256}}}
    return [rows(LOCAL, arm=arm, **place) for arm in ("sliding", "dense")]


def loss(row, length=8192, start=None):
    of_length = next(losses for losses in row["losses"] if losses["length"] == length)
    return next(b["loss"] for b in of_length["bins"] if b["from"] == start) if start else of_length["loss"]


def gain(row):
    """The loss that a longer context saves."""
    return loss(row, start=512) - loss(row, start=4096)


def beside(ours, theirs, value):
    """The mean of one group of runs over that of another, and its 95 % interval."""
    (a, b), n = ([value(row) for row in group] for group in (ours, theirs)), min(len(ours), len(theirs))
    error = math.sqrt(variance(a) / len(a) + variance(b) / len(b)) / fmean(b)
    return f"{100 * fmean(a) / fmean(b) - 100:+.1f} ± {100 * STUDENT[n - 1] * error:.1f} %".replace("-", "−")


def answered(group, kind):
    right = lambda row: [a["right"] for a in row["answers"]["answered"] if (a["length"], a["kind"]) == (8192, kind)]
    return ", ".join(f"{100 * fmean(right(row)):.0f}" for row in group) + " %"


def learned():
    (ours, dense), (last, dense_then) = (runs("text", arm) for arm in ("ours", "dense")), sliding()
    facts, dense_facts = (runs("needles", arm) for arm in ("ours", "dense"))
    valid = lambda row: row["curve"][-1]["validation_loss"]
    kept = lambda group, whole: f"{100 * fmean(map(gain, group)) / fmean(map(gain, whole)):.0f} %"
    cache = lambda group: f"{next(c['bytes'] for c in group[0]['answers']['caches'] if c['length'] == 16384) / 1e6:.1f} MB"
    text = lambda what, value: [
        what,
        beside(ours, dense, value),
        f"{fmean(map(value, dense)):.3f}",
        beside(last, dense_then, value),
    ]
    recalled = lambda group: ", ".join(f"{100 * row['accuracy']:.0f}" for row in group) + " %"
    pruned, whole = (runs("recall", arm) for arm in ("ours", "dense"))
    recall = lambda share: [
        f"recall of 512 tokens, one key in {share}",
        recalled([row for row in pruned if row["window"] * share == 512]),
        recalled(whole),
        None,
    ]
    return table(
        ["", "ours", "dense", "the last `w` keys"],
        [
            text("text of 8192 bytes, `w` 1024: the loss", loss),
            text("… bytes 512 to 1024, where nothing is dropped", lambda row: loss(row, start=512)),
            text("… bytes 4096 to 8192", lambda row: loss(row, start=4096)),
            text("… read to 32 768 bytes", lambda row: loss(row, 32768)),
            ["… kept of what context gains dense attention", kept(ours, dense), "", kept(last, dense_then)],
            ["facts at four times the training length: pass keys", answered(facts, "passkey"), answered(dense_facts, "passkey"), None],
            ["… needles", answered(facts, "needle"), answered(dense_facts, "needle"), None],
            ["… the text of these models", beside(facts, dense_facts, valid), f"{fmean(map(valid, dense_facts)):.3f}", None],
            *(recall(share) for share in (8, 16, 32)),
            ["caches behind 16 384 bytes", cache(facts), cache(dense_facts), None],
        ],
    )


# Plots.
def by_length(name, title, phase):
    layers = {1024 * n: f"layer-n{n}k-" for n in (4, 8, 16, 32, 128)}
    lines = {"ours, w 2048": [(n, bench(layer + "w2048", phase)) for n, layer in layers.items()]}
    lines |= {"ours, dense": [(n, bench(layer + "dense", phase)) for n, layer in layers.items()]}
    lines |= {peer: [(n, dense_peer(layer + "w2048", peer, phase)) for n, layer in layers.items()] for peer in PEERS}
    return log_chart(name, f"{title}, H 32/8, D 128, bf16, causal", "queries and keys", "ms", lines)


# Pages.
PAGES = {
    "README.md": [step, attention],
    "book/src/performance.md": [peers, parts, engines, decode, masks, cpu],
    "book/src/training-step.md": [times, memory, kinds, products],
    "book/src/tutorial.md": [arms, small],
    "book/src/learning.md": [learned],
}


def outputs():
    """Every page and plot: path, what it is to be, and what of it differs."""
    for name, makers in PAGES.items():
        text, stale = (ROOT / name).read_text(), []
        for make in makers:
            mark = f"bench-report: {make.__name__}"
            old, new = re.compile(rf"(<!-- {mark} -->\n)(.*?)(<!-- /{mark} -->)", re.DOTALL), make() + "\n"
            found = old.findall(text)
            if len(found) != 1 or text.count("<!-- bench-report") != len(makers):
                raise ValueError(f"{name}: {len(found)} blocks `{mark}`, and all are to be {[m.__name__ for m in makers]}")
            stale += [f"the block `{mark}` of {name}"] if found[0][1] != new else []
            text = old.sub(lambda match: match[1] + new + match[3], text)
        yield ROOT / name, text, stale
    length = ("forward-by-length", "Forward, selection included", "end-to-end"), ("backward-by-length", "Backward", "backward")
    for svg in (by_length(*which) for which in length):
        path, text = ROOT / f"book/src/img/{svg.name}.svg", svg.source()
        stale = not path.exists() or path.read_text() != text
        yield path, text, [f"the plot {path.relative_to(ROOT)}"] if stale else []


def account_faults():
    """Suites that ended and that the account of them does not tell of."""
    account = (HERE / "h200/suite.md").read_text()
    for name in ("h200/suite.json", "h200/suite-vulkan.json", "cpu/suite-vulkan.json"):
        for run in (run for run in load(name)["runs"] if run["ended"]):
            told = f"{run['passed']} passed", f"{run['passed']} of {run['passed'] + run['failed'] + run['unknown']}"
            if f"`{run['commit']}`" not in account or not any(text in account for text in told):
                yield f"h200/suite.md does not tell of the run of {run['commit']} in {name}"


def main():
    check, faults = {"": False, "--check": True}[" ".join(sys.argv[1:])], list(account_faults())
    for path, text, stale in outputs():
        if stale and not check:
            path.write_text(text)
            print(f"rewritten: {', '.join(stale)}")
        faults += [f"{what} is not what the rows say" for what in stale if check]
    for path in [ROOT / "README.md", *sorted(ROOT.glob("book/src/*.md"))]:
        faults += sentence_faults(path.relative_to(ROOT), path.read_text())
    if faults:
        raise ValueError("\n".join(faults))
    print("tables, plots and figures are what the rows say")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(str(error))
