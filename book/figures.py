"""Draws the figures of the book into src/img/: `python3 book/figures.py` (standard library only).

The intervals are computed here by the definition, query by query, and not by the library, so the
figures are an independent check of the closed form the library uses: both are computed and compared.
"""

import math
import random
from pathlib import Path

OUT = Path(__file__).parent / "src" / "img"

# The worked example of the book; `examples/tutorial` asserts that the library finds the same intervals.
SCORES = [0.5, 0.2, 0.9, 0.3, 0.6, 0.1, 0.4, 0.7, 0.6, 0.2, -math.inf, 0.5, 0.3, 0.8, 0.4, 0.65]
WINDOW = 4

BLUE, DARK, PALE, GREY, RED, GREEN = "#3b76af", "#1f2933", "#e9edf1", "#9aa5b1", "#c0453b", "#4f9d69"
ORANGE = "#d9822b"


def better_first(scores):
    """Attendable keys, greater score first, ties by lower index."""
    keys = [j for j, z in enumerate(scores) if z != -math.inf]
    return sorted(keys, key=lambda j: (-scores[j], j))


def selected(scores, window, position):
    """The keys a query at `position` attends to, by definition."""
    return [j for j in better_first(scores) if j <= position][:window]


def intervals(scores, window):
    """First and end position of each key, by definition; checked against the closed form."""
    n, order = len(scores), better_first(scores)
    sets = [selected(scores, window, p) for p in range(n)]
    found = []
    for j in range(n):
        at = [p for p in range(n) if j in sets[p]]
        assert at == list(range(j, j + len(at))), "a key is attended on one interval that begins at it"
        found.append((j, j + len(at)))
    for rank, j in enumerate(order):
        end = sorted(order[:rank])[window - 1] if rank >= window else n
        assert found[j] == (j, max(j, end)), "the closed form"
    return found


class Svg:
    """Collects elements and writes a file with a white ground, readable on dark pages too."""

    def __init__(self, name, width, height, title):
        self.name, self.size, self.title, self.items = name, (width, height), title, []

    def rect(self, x, y, w, h, fill, stroke="none", extra=""):
        self.items.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{stroke}" {extra}/>')

    def circle(self, x, y, r, fill="white", stroke=RED):
        self.items.append(f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>')

    def path(self, d, stroke, width=1.0):
        self.items.append(f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="{width:g}"/>')

    def text(self, x, y, string, size=12, anchor="middle", fill=DARK, extra=""):
        self.items.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" {extra}>{string}</text>')

    def source(self):
        w, h = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
            f'font-family="sans-serif" role="img">\n<title>{self.title}</title>\n'
            f'<rect width="{w}" height="{h}" fill="white"/>\n'
        )
        return head + "\n".join(self.items) + "\n</svg>\n"

    def write(self):
        (OUT / f"{self.name}.svg").write_text(self.source())


# Distinguishable without colour vision; further lines use them again.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#999999"]


def log_axis(values, start, end, base):
    """From values to pixels, with a margin, so that no marker lies on the frame; and the powers of the base."""
    low, high = math.log(min(values) / 1.25), math.log(max(values) * 1.25)
    powers = [base**e for e in range(math.ceil(low / math.log(base)), math.floor(high / math.log(base)) + 1)]
    return lambda v: round(start + (end - start) * (math.log(v) - low) / (high - low), 1), powers


def log_chart(name, title, x_name, y_name, series):
    """Lines `{name: [(x, y), ..]}` on logarithmic axes; `bench-results/report.py` draws its plots with it."""
    left, right, top, bottom = 70, 520, 40, 380
    series = {label: [(x, y) for x, y in line if y is not None] for label, line in series.items()}
    x, xs = log_axis([point[0] for line in series.values() for point in line], left, right, 2)
    y, ys = log_axis([point[1] for line in series.values() for point in line], bottom, top, 10.0)
    svg = Svg(name, 720, 440, title)
    svg.text(left, 22, title, 14, "start")
    for tick in xs:
        svg.path(f"M{x(tick):g} {top}V{bottom}", "#dddddd")
        svg.text(x(tick), bottom + 16, f"{tick // 1024}K" if tick >= 1024 else tick)
    for tick in ys:
        svg.path(f"M{left} {y(tick):g}H{right}", "#dddddd")
        svg.text(left - 6, y(tick) + 4, f"{tick:g}", anchor="end")
    svg.rect(left, top, right - left, bottom - top, "none", GREY)
    svg.text((left + right) / 2, 424, x_name)
    svg.text(18, 210, y_name, extra='transform="rotate(-90 18 210)"')
    for place, (label, line) in enumerate(series.items()):
        colour, at = COLOURS[place % len(COLOURS)], [(x(a), y(b)) for a, b in sorted(line)]
        svg.path("M" + "L".join(f"{a:g} {b:g}" for a, b in at), colour, 2)
        for a, b in [*at, (right + 14, top + 10 + 20 * place)]:
            svg.circle(a, b, 3.5, colour, colour)
        svg.text(right + 24, top + 14 + 20 * place, label, anchor="start")
    return svg


def number(z):
    return "−∞" if z == -math.inf else f"{z:g}"


def draw_intervals():
    """Positions down, keys across: the attention mask, one bar per key."""
    cell, left, top, n = 30, 62, 78, len(SCORES)
    svg = Svg("intervals", left + n * cell + 30, top + n * cell + 66, "Each key is attended on one interval of positions")
    svg.text(left + n * cell / 2, 20, "key j", 14)
    svg.text(18, top + n * cell / 2, "query position p", 14, extra=f'transform="rotate(-90 18 {top + n * cell / 2})"')
    svg.text(left - 8, 44, "j", 11, "end", GREY)
    svg.text(left - 8, 64, "z", 11, "end", GREY)
    for p in range(n):
        svg.text(left - 8, top + p * cell + 20, p, 11, "end", GREY)
        svg.rect(left, top + p * cell, (p + 1) * cell, cell, PALE)
    for j, (first, end) in enumerate(intervals(SCORES, WINDOW)):
        x = left + j * cell
        svg.text(x + cell / 2, 44, j, 11, fill=GREY)
        svg.text(x + cell / 2, 64, number(SCORES[j]), 11)
        if end > first:
            svg.rect(x + 5, top + first * cell + 3, cell - 10, (end - first) * cell - 6, BLUE, extra='rx="6"')
        else:
            svg.circle(x + cell / 2, top + j * cell + cell / 2, 6)
    grid = "".join(f"M{left} {top + i * cell}h{n * cell}M{left + i * cell} {top}v{n * cell}" for i in range(n + 1))
    svg.path(grid, "#cbd2d9", 0.5)
    y = top + n * cell + 26
    svg.rect(left, y - 11, 12, 14, BLUE, extra='rx="4"')
    svg.text(left + 18, y, "attended", 12, "start")
    svg.circle(left + 110, y - 4, 6)
    svg.text(left + 122, y, "never attended", 12, "start")
    svg.rect(left + 240, y - 11, 14, 14, PALE, "#cbd2d9")
    svg.text(left + 260, y, "visible", 12, "start")
    svg.text(left, y + 24, f"N = {n} keys, window w = {WINDOW}: every row holds at most {WINDOW} bars.", 12, "start")
    svg.write()


def draw_landing():
    """The README's figure: a few keys down, queries across, one bar per key."""
    scores, window, cell, left, top = [0.5, 0.2, 0.9, 0.3, 0.6, 0.1, 0.7, 0.4], 2, 34, 120, 52
    n, spans = len(scores), intervals(scores, window)
    svg = Svg("one-interval", left + n * cell + 170, top + n * 26 + 40, "Each key is attended on one interval of queries")
    svg.text(left + n * cell / 2, 20, "queries, in order", 13)
    for p in range(n):
        svg.text(left + (p + 0.5) * cell, 42, p, 11, fill=GREY)
    for j, (first, end) in enumerate(spans):
        y = top + j * 26
        svg.rect(left + j * cell, y, (n - j) * cell, 26, PALE)
        svg.text(left - 10, y + 18, f"key {j}, score {number(scores[j])}", 12, "end")
        what = f"queries {first} to {end - 1}" if end > first + 1 else f"query {first}" if end > first else "never attended"
        if end > first:
            svg.rect(left + first * cell + 3, y + 5, (end - first) * cell - 6, 16, BLUE, extra='rx="5"')
        else:
            svg.circle(left + (j + 0.5) * cell, y + 13, 5)
        svg.text(left + n * cell + 10, y + 18, what, 12, "start")
    grid = "".join(f"M{left + i * cell} {top}v{n * 26}" for i in range(n + 1)) + "".join(f"M{left} {top + i * 26}h{n * cell}" for i in range(n + 1))
    svg.path(grid, "#cbd2d9", 0.5)
    svg.text(left, top + n * 26 + 24, f"window w = {window}: each query keeps the {window} best of the keys it sees", 12, "start")
    svg.write()
    return spans


def draw_population():
    """The same plot at a size where the population shows: most keys never live."""
    n, w, scale, left, top = 512, 24, 1, 52, 30
    rng = random.Random(7)
    spans = intervals([rng.gauss(0, 1) for _ in range(n)], w)
    live = sum(end > first for first, end in spans)
    estimate = w * (1 + math.log(n / w))
    svg = Svg("population", left + n * scale + 24, top + n * scale + 64, "Most keys are never attended")
    svg.rect(left, top, n * scale, n * scale, "white", "#cbd2d9")
    svg.items.append(f'<path d="M{left} {top}L{left + n} {top + n}H{left}z" fill="{PALE}"/>')
    svg.path("".join(f"M{left + j + 0.5:g} {top + f}V{top + e}" for j, (f, e) in enumerate(spans) if e > f), BLUE, 1.3)
    svg.path("".join(f"M{left + j - 0.5:g} {top + j}h2" for j, (f, e) in enumerate(spans) if e == f), RED, 2.5)
    svg.text(left + n / 2, 18, "key", 13)
    svg.text(22, top + n / 2, "query position", 13, extra=f'transform="rotate(-90 22 {top + n / 2})"')
    y = top + n + 24
    svg.text(left, y, f"N = {n}, w = {w}, independent normal scores: {live} keys are ever attended (blue),", 12, "start")
    svg.text(left, y + 18, f"{n - live} are dead on arrival (red). Expected: about w·(1 + ln(N/w)) = {estimate:.0f}.", 12, "start")
    svg.write()
    return live, estimate


def tile_keys(spans, first, end):
    """Keys that positions `first..end` touch: those alive throughout, and the others."""
    touch = [j for j, (f, e) in enumerate(spans) if f < end and e > max(f, first)]
    full = [j for j in touch if spans[j][0] <= first and spans[j][1] >= end]
    return full, [j for j in touch if j not in full]


def draw_query_tile():
    """A tile of queries, and the dense block over its key list."""
    cell, left, top, n, p0, p1 = 26, 60, 76, len(SCORES), 4, 8
    spans = intervals(SCORES, WINDOW)
    full, boundary = tile_keys(spans, p0, p1)
    keys, gap = full + boundary, 70
    right = left + n * cell + gap
    svg = Svg("query-tile", right + len(keys) * cell + 40, top + 4 * cell + 78, "A query tile and its key list")
    svg.text(left + n * cell / 2, 22, f"positions {p0}–{p1 - 1} of the plot above", 13)
    svg.text(right + len(keys) * cell / 2, 22, "what the tile computes", 13)
    svg.text(left - 8, 60, "key", 11, "end", GREY)
    for j in range(n):
        svg.text(left + j * cell + cell / 2, 60, j, 11, fill=DARK if j in keys else GREY)
    for p in range(p0, p1):
        y = top + (p - p0) * cell
        svg.text(left - 8, y + 17, p, 11, "end", GREY)
        svg.text(right - 8, y + 17, p, 11, "end", GREY)
        svg.rect(left, y, (p + 1) * cell, cell, PALE)
        for j in range(n):
            if spans[j][0] <= p < spans[j][1]:
                svg.rect(left + j * cell + 3, y + 3, cell - 6, cell - 6, BLUE if j in full else GREEN)
        for slot, j in enumerate(keys):
            on = spans[j][0] <= p < spans[j][1]
            x = right + slot * cell
            svg.rect(x + 3, y + 3, cell - 6, cell - 6, (BLUE if j in full else GREEN) if on else "white", "none" if on else GREY)
    for slot, j in enumerate(keys):
        svg.text(right + slot * cell + cell / 2, 60, j, 11)
    for x, count in ((left, n), (right, len(keys))):
        svg.path("".join(f"M{x + i * cell} {top}v{4 * cell}" for i in range(count + 1)), "#cbd2d9", 0.5)
        svg.path("".join(f"M{x} {top + i * cell}h{count * cell}" for i in range(5)), "#cbd2d9", 0.5)
    y = top + 4 * cell + 26
    svg.rect(left, y - 11, 14, 14, BLUE)
    svg.text(left + 20, y, "full keys: alive for the whole tile, no test", 12, "start")
    svg.rect(left, y + 13, 14, 14, GREEN)
    svg.text(left + 20, y + 24, "boundary keys: each pair takes the interval test", 12, "start")
    svg.rect(right - 20, y - 11, 14, 14, "white", GREY)
    svg.text(right, y, "executed, then masked", 12, "start")
    svg.write()
    return full, boundary


def draw_backward():
    """Live keys down, queries across: a key's queries are one contiguous range."""
    cell, left, top, n = 26, 92, 64, len(SCORES)
    spans = intervals(SCORES, WINDOW)
    live = [j for j, (f, e) in enumerate(spans) if e > f]
    svg = Svg("backward", left + n * cell + 190, top + len(live) * cell + 54, "The backward pass: one range of queries per key")
    svg.text(left + n * cell / 2, 20, "query position", 13)
    svg.text(20, top + len(live) * cell / 2, "live keys", 13, extra=f'transform="rotate(-90 20 {top + len(live) * cell / 2})"')
    for p in range(n):
        svg.text(left + p * cell + cell / 2, 50, p, 11, fill=GREY)
    for row, j in enumerate(live):
        y, (f, e) = top + row * cell, spans[j]
        svg.text(left - 10, y + 17, f"key {j}", 11, "end")
        svg.rect(left + f * cell + 2, y + 4, (e - f) * cell - 4, cell - 8, BLUE, extra='rx="5"')
        svg.text(left + n * cell + 12, y + 17, f"dk, dv, dz of {j}: {e - f} quer{'y' if e - f == 1 else 'ies'}", 11, "start")
    svg.path("".join(f"M{left + i * cell} {top}v{len(live) * cell}" for i in range(n + 1)), "#cbd2d9", 0.5)
    svg.path("".join(f"M{left} {top + i * cell}h{n * cell}" for i in range(len(live) + 1)), "#cbd2d9", 0.5)
    svg.text(left, top + len(live) * cell + 30, f"{len(live)} of the {n} keys are ever attended; the gradients of the others are zero.", 12, "start")
    svg.write()


# The masks of the chapter on masks: 16 queries by 16 keys, each a function of query and key. `examples/tutorial` asserts
# that the library builds the same.
DOCUMENTS = [0] * 5 + [1] * 7 + [2] * 4


def top(i, j):
    return j in selected(SCORES, WINDOW, i)


def in_blocks(shows, block, majority):
    """Blocks of keys as a whole."""

    def whole(i, j):
        keys = range(j // block * block, min(j // block * block + block, len(SCORES)))
        seen = sum(shows(i, key) for key in keys)
        return 2 * seen > len(keys) if majority else seen > 0

    return whole


MASKS = {
    "causal": lambda i, j: j <= i,
    "sliding_window, 5 keys": lambda i, j: j <= i < j + 5,
    "padding behind 11 keys": lambda i, j: j < 11,
    "documents of 5, 7 and 4": lambda i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "top 4 among causal": top,
    "above 0.45": lambda i, j: SCORES[j] > 0.45,
    "top, blocks of 4, Any": in_blocks(top, 4, False),
    "top, blocks of 4, Majority": in_blocks(top, 4, True),
}


def draw_masks():
    """A picture of each mask; returns how many pairs each shows."""
    cell, n, gap, head = 9, len(SCORES), 26, 40
    side = cell * n
    svg = Svg("masks", 4 * (side + gap) + gap, 2 * (side + head) + 20, "Masks: queries down, keys across; blue is visible")
    for place, (name, shows) in enumerate(MASKS.items()):
        x, y = gap + place % 4 * (side + gap), head + place // 4 * (side + head)
        svg.text(x, y - 10, name, 11, "start")
        for i in range(n):
            for j in range(n):
                svg.rect(x + j * cell, y + i * cell, cell - 1, cell - 1, BLUE if shows(i, j) else PALE)
    svg.write()
    return {name: sum(shows(i, j) for i in range(n) for j in range(n)) for name, shows in MASKS.items()}


def draw_plan():
    """The blocks of a plan for the sliding window: empty, partial, full."""
    cell, n, left, block_q, block_k = 12, 48, 20, 4, 8
    svg = Svg("tile-plan", left + n * cell + 190, n * cell + 40, "A tile plan: empty, partial and full blocks")
    shows = lambda i, j: j <= i < j + 18
    kinds = {"empty": PALE, "partial": "#9dbbd8", "full": BLUE}
    counts = dict.fromkeys(kinds, 0)
    for i in range(0, n, block_q):
        for j in range(0, n, block_k):
            count = sum(shows(a, b) for a in range(i, i + block_q) for b in range(j, j + block_k))
            kind = "empty" if count == 0 else "full" if count == block_q * block_k else "partial"
            counts[kind] += 1
            svg.rect(left + j * cell, 20 + i * cell, block_k * cell - 1, block_q * cell - 1, kinds[kind])
            svg.text(left + (j + block_k / 2) * cell, 24 + (i + block_q / 2) * cell, count, 11, fill="white" if kind == "full" else DARK)
    for row, (kind, count) in enumerate(counts.items()):
        y = 40 + 28 * row
        svg.rect(left + n * cell + 20, y - 12, 18, 18, kinds[kind])
        svg.text(left + n * cell + 48, y + 2, f"{kind}: {count} blocks", 12, "start")
    svg.write()


def draw_runners_up():
    """Live keys and runners-up down, queries across: where a key is attended, and where its rank learns."""
    cell, left, top, n, more = 26, 126, 64, len(SCORES), 2
    spans, wider = intervals(SCORES, WINDOW), intervals(SCORES, WINDOW + more)
    rows = [(j, first, end, far) for j, ((first, end), (_, far)) in enumerate(zip(spans, wider)) if far > first]
    for p in range(n):
        # By the definition: the keys that a window of so many more adds at this position.
        added = set(selected(SCORES, WINDOW + more, p)) - set(selected(SCORES, WINDOW, p))
        assert added == {j for j, _, end, far in rows if end <= p < far}, "a runner-up misses the window by little"
    height = len(rows) * cell
    svg = Svg("runners-up", left + n * cell + 158, top + height + 92, "Runners-up: the positions behind a key's interval")
    svg.text(left + n * cell / 2, 20, "query position", 13)
    for p in range(n):
        svg.text(left + p * cell + cell / 2, 50, p, 11, fill=GREY)
    for row, (j, first, end, far) in enumerate(rows):
        y = top + row * cell
        svg.rect(left + j * cell, y, (n - j) * cell, cell, PALE)
        svg.text(left - 10, y + 17, f"key {j}, score {number(SCORES[j])}", 11, "end")
        if end > first:
            svg.rect(left + first * cell + 2, y + 4, (end - first) * cell - 4, cell - 8, BLUE, extra='rx="5"')
        if far > end:
            svg.rect(left + end * cell + 2, y + 8, (far - end) * cell - 4, cell - 16, ORANGE, extra='rx="4"')
        svg.text(left + n * cell + 12, y + 17, f"[{first}, {end}), far {far}", 11, "start")
    svg.path("".join(f"M{left + i * cell} {top}v{height}" for i in range(n + 1)), "#cbd2d9", 0.5)
    svg.path("".join(f"M{left} {top + i * cell}h{n * cell}" for i in range(len(rows) + 1)), "#cbd2d9", 0.5)
    y = top + height + 26
    svg.rect(left, y - 12, 18, 15, BLUE, extra='rx="4"')
    svg.text(left + 26, y, "attended: the score gets the gradient of its logits", 12, "start")
    svg.rect(left, y + 15, 18, 9, ORANGE, extra='rx="4"')
    svg.text(left + 26, y + 24, "runner-up: not attended, but its rank has a gradient", 12, "start")
    text = f"w = {WINDOW} and {more} runners-up; the {n - len(rows)} keys that are left out are neither at any position."
    svg.text(left, y + 48, text, 12, "start")
    svg.write()
    return [far for _, far in wider]


def cached(scores, window):
    """The key in each slot at each position, as a cache has them: the newcomer, or one it has been given before."""
    slots, states, order = [None] * window, [], better_first(scores)
    for j in range(len(scores)):
        if j in order:
            worst = next((s for s in range(window) if slots[s] is None), None)
            if worst is None:
                worst = max(range(window), key=lambda s: order.index(slots[s]))
            if slots[worst] is None or order.index(j) < order.index(slots[worst]):
                slots[worst] = j
        states.append(list(slots))
    return states


def draw_cache():
    """Slots down, tokens across: the bars of the interval picture, laid into as many rows as the window has keys."""
    cell, left, top, n = 34, 92, 92, len(SCORES)
    states, spans = cached(SCORES, WINDOW), intervals(SCORES, WINDOW)
    for p, state in enumerate(states):
        assert {j for j in state if j is not None} == set(selected(SCORES, WINDOW, p)), "the cache holds the selection"
    svg = Svg("cache-slots", left + n * cell + 30, top + WINDOW * cell + 96, "The keys in the slots of a cache, token by token")
    svg.text(left + n * cell / 2, 20, "token that arrives, with its score", 13)
    for p in range(n):
        svg.text(left + (p + 0.5) * cell, 46, p, 11, fill=GREY)
        svg.text(left + (p + 0.5) * cell, 64, number(SCORES[p]), 11)
        if spans[p][1] == spans[p][0]:
            svg.circle(left + (p + 0.5) * cell, 79, 5)
    svg.rect(left, top, n * cell, WINDOW * cell, PALE)
    svg.path("".join(f"M{left + i * cell} {top}v{WINDOW * cell}" for i in range(n + 1)), "#cbd2d9", 0.5)
    svg.path("".join(f"M{left} {top + i * cell}h{n * cell}" for i in range(WINDOW + 1)), "#cbd2d9", 0.5)
    for slot in range(WINDOW):
        y = top + slot * cell
        svg.text(left - 10, y + cell / 2 + 4, f"slot {slot}", 12, "end")
        held = [state[slot] for state in states]
        for j in sorted({j for j in held if j is not None}):
            first, end = held.index(j), n - held[::-1].index(j)
            assert (first, end) == spans[j], "a key is in its slot while it is attended"
            x, width = left + first * cell, (end - first) * cell
            svg.rect(x + 2, y + 5, width - 4, cell - 10, BLUE, extra='rx="6"')
            svg.text(x + width / 2, y + cell / 2 + 4, f"key {j}" if width > cell else j, 11, fill="white")
    y = top + WINDOW * cell + 26
    svg.rect(left, y - 12, 18, 15, BLUE, extra='rx="5"')
    svg.text(left + 26, y, "in its slot from its arrival until a better key takes the slot", 12, "start")
    svg.circle(left + 9, y + 19, 5)
    svg.text(left + 26, y + 23, "forgotten at once: worse than every key held, or a score of −∞", 12, "start")
    svg.text(left, y + 48, f"w = {WINDOW}: a query attends to the keys of its own column, {WINDOW} at most.", 12, "start")
    svg.write()
    return states[-1]


def draw_threshold():
    """Positions across, scores up: a key lives until the threshold, the window-th best so far, passes it."""
    n, w, block, step, left, top, height = 48, 6, 12, 13, 58, 30, 260
    rng = random.Random(1800)
    scores = [rng.random() for _ in range(n)]
    spans = intervals(scores, w)
    # The least score that a query at each position keeps; none while there is room.
    least = [min(scores[j] for j in selected(scores, w, p)) if p >= w - 1 else None for p in range(n)]
    for j, (first, end) in enumerate(spans):
        passed = (p for p in range(j, n) if least[p] is not None and least[p] > scores[j])
        assert end == next(passed, n), "a key ends where the threshold passes it"
    low, high = -0.05, 1.05
    at = lambda z: top + height * (high - z) / (high - low)
    svg = Svg("threshold", left + n * step + 30, top + height + 100, "A key is kept until the threshold passes its score")
    svg.rect(left, top, n * step, height, "white", "#cbd2d9")
    svg.text(20, top + height / 2, "score", 13, extra=f'transform="rotate(-90 20 {top + height / 2})"')
    for p in range(0, n + 1, block):
        svg.path(f"M{left + p * step} {top}v{height}", GREY, 1)
        svg.text(left + p * step, top + height + 18, p, 11, fill=GREY)
    svg.text(left + n * step / 2, top + height + 34, "position", 13)
    for j, (first, end) in enumerate(spans):
        x, y = left + (j + 0.5) * step, at(scores[j])
        if end > first:
            svg.path(f"M{x} {y:.1f}H{left + min(end + 0.5, n) * step}", BLUE, 2)
            svg.circle(x, y, 3.5, BLUE, BLUE)
        else:
            svg.circle(x, y, 3.5)
    stair = "".join(f"H{left + (p + 0.5) * step}V{at(least[p]):.1f}" for p in range(w, n))
    svg.path(f"M{left + (w - 0.5) * step} {at(least[w - 1]):.1f}{stair}H{left + n * step}", DARK, 2)
    for p in range(block, n + 1, block):
        y = at(least[p - 1])
        svg.rect(left + p * step - 5, y - 5, 10, 10, DARK)
    y = top + height + 62
    svg.circle(left + 6, y - 4, 3.5, BLUE, BLUE)
    svg.text(left + 18, y, "a key, kept along its line", 12, "start")
    svg.circle(left + 196, y - 4, 3.5)
    svg.text(left + 208, y, "never kept", 12, "start")
    svg.path(f"M{left + 296} {y + 1}h10v-9h10", DARK, 2)
    svg.text(left + 324, y, f"threshold, the {w}th best so far", 12, "start")
    svg.rect(left + 1, y + 12, 10, 10, DARK)
    svg.text(left + 18, y + 22, f"the threshold at an edge between blocks, here of {block} positions: found first, each for itself", 12, "start")
    svg.write()
    return sum(end > first for first, end in spans)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    draw_intervals()
    print("the README's intervals", draw_landing())
    draw_query_tile()
    draw_backward()
    draw_plan()
    print("masks", draw_masks())
    print("runners-up: far", draw_runners_up())
    print("the cache at the end", draw_cache())
    print("threshold: live keys", draw_threshold())
    print("intervals", intervals(SCORES, WINDOW))
    print("tile of positions 4..8: full, boundary =", tile_keys(intervals(SCORES, WINDOW), 4, 8))
    print("population: live keys, estimate =", draw_population())
