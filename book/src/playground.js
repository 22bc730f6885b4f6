// The playground of the book. `flashDma.intervals` and `flashDma.attended` compute, by two ways that share the order of
// keys and nothing else; all below them draws. The program `playground` of `tests/` compares both with the reference.
(() => {
  "use strict";

  const isHidden = (score) => score === -Infinity;

  /** Whether key `a` ranks before key `b`: sinks by index, then the greater score, NaN last; a tie to the lower index. */
  function ranksBefore(scores, sinks, a, b) {
    const aIsSink = a < sinks;
    const bIsSink = b < sinks;
    if (aIsSink !== bIsSink) return aIsSink;
    if (!aIsSink) {
      const [x, y] = [scores[a], scores[b]];
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(y);
      if (x > y) return true;
      if (x < y) return false;
    }
    return a < b;
  }

  /** Refuses a rule that no position could keep. */
  function check({ window, recent, sinks }) {
    if (window < 1) throw new RangeError("the keep window must be at least 1");
    if (recent + sinks > window) {
      throw new RangeError(`${recent} recent keys and ${sinks} sinks pass the window of ${window} keys`);
    }
  }

  /**
   * One past the last position that attends to the key; the key itself if none does. A key stops being recent at
   * `key + recent` and competes from then on, so it leaves where the last of `window - recent` better keys competes.
   */
  function endOf(scores, { window, recent, sinks }, key) {
    if (isHidden(scores[key])) return key;
    let better = 0;
    for (let other = 0; other < scores.length; other += 1) {
      const competes = other !== key && !isHidden(scores[other]);
      if (competes && ranksBefore(scores, sinks, other, key)) better += 1;
      if (other >= key && better >= window - recent) return Math.min(other + recent, scores.length);
    }
    return scores.length;
  }

  /**
   * `{end, far}` of each key: it is attended on `[key, end)` and a runner-up on `[end, far)`. With `runnersUp` more
   * keys in the window, it would be attended on `[key, far)`.
   */
  function intervals(scores, { window, recent = 0, sinks = 0, runnersUp = 0 }) {
    check({ window, recent, sinks });
    const wider = { window: window + runnersUp, recent, sinks };
    return Array.from(scores, (_, key) => ({
      end: endOf(scores, { window, recent, sinks }, key),
      far: endOf(scores, wider, key),
    }));
  }

  /** The keys that a position attends to, in no particular order: its last ones, and the best of the older ones. */
  function attended(scores, { window, recent = 0, sinks = 0 }, position) {
    check({ window, recent, sinks });
    const visible = Array.from(scores.slice(0, position + 1), (_, key) => key);
    const border = Math.max(0, visible.length - recent);
    const older = visible.slice(0, border).filter((key) => !isHidden(scores[key]));
    older.sort((a, b) => (ranksBefore(scores, sinks, a, b) ? -1 : 1));
    const last = visible.slice(border).filter((key) => !isHidden(scores[key]));
    return [...older.slice(0, window - recent), ...last];
  }

  window.flashDma = { intervals, attended };

  const root = document.getElementById("interval-playground");
  if (!root) return;

  const KEYS = 32;
  /** Sides of a cell of a picture, and height of the range of scores and of the strip of hidden keys below it. */
  const [CELL, RANGE, STRIP] = [10, 110, 16];
  const MARGIN = { left: 24, top: 6, right: 6, bottom: 24 };
  const SIDE = KEYS * CELL;

  const figure = (name) => root.querySelector(`svg[data-figure="${name}"]`);
  const input = (name) => root.querySelector(`input[name="${name}"]`);
  const text = (name) => root.querySelector(`[data-text="${name}"]`);
  const [scoreFigure, intervalFigure, maskFigure] = ["scores", "intervals", "mask"].map(figure);
  const names = ["window", "recent", "sinks", "runnersUp"];
  const hundredths = (score) => Math.round(Math.min(1, Math.max(0, score)) * 100) / 100;

  // The same first picture for everyone: a fixed walk over the hundredths.
  let scores = Array.from({ length: KEYS }, (_, key) => ((key * 41 + 23) % 97) / 97).map(hundredths);
  let chosen = 7;

  /** The settings, made to fit: the window is obeyed first, then recent keys, then sinks. */
  function settings() {
    const [window, recent, sinks, runnersUp] = names.map((name) => Number(input(name).value));
    const fitting = Math.min(recent, window);
    return { window, recent: fitting, sinks: Math.min(sinks, window - fitting), runnersUp };
  }

  function add(parent, name, attributes, content = "") {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = content;
    return parent.appendChild(element);
  }

  /** Empties a picture and returns the group in which a cell at column x and row y is at (x, y) times `CELL`. */
  function start(svg, height, rows) {
    svg.replaceChildren();
    const width = MARGIN.left + SIDE + MARGIN.right;
    svg.setAttribute("viewBox", `0 0 ${width} ${MARGIN.top + height + MARGIN.bottom}`);
    const plot = add(svg, "g", { transform: `translate(${MARGIN.left} ${MARGIN.top})` });
    const middle = (cell) => (cell + 0.5) * CELL;
    for (let tick = 0; tick < KEYS; tick += 8) {
      add(plot, "text", { x: middle(tick), y: height + 11, "text-anchor": "middle" }, tick);
      if (rows) add(plot, "text", { x: -4, y: middle(tick) + 3, "text-anchor": "end" }, tick);
    }
    const below = { x: SIDE, y: height + 21, "text-anchor": "end" };
    add(plot, "text", below, rows ? "query position" : "key");
    if (rows) add(plot, "text", { x: -4, y: SIDE, "text-anchor": "end" }, "key");
    return plot;
  }

  /** The rows of keys down and positions across, each as wide as the positions that see its key. */
  function startRows(svg) {
    const plot = start(svg, SIDE, true);
    for (let key = 0; key < KEYS; key += 1) {
      const place = { x: key * CELL, y: key * CELL, width: SIDE - key * CELL, height: CELL - 1 };
      add(plot, "rect", { ...place, class: key === chosen ? "seen chosen" : "seen", "data-row": key });
    }
    return plot;
  }

  /** Cells `from` to `to` of a row: full height if they are attended, half of it if they are runners-up. */
  function bar(parent, row, [from, to], name) {
    if (from === to) return;
    const inset = name === "attended" ? 0 : 2.5;
    const [y, height] = [row * CELL + inset, CELL - 1 - 2 * inset];
    add(parent, "rect", { x: from * CELL, y, width: (to - from) * CELL - 0.5, height, class: name });
  }

  function drawScores() {
    const plot = start(scoreFigure, RANGE + STRIP, false);
    add(plot, "rect", { class: "seen", x: 0, y: 0, width: SIDE, height: RANGE });
    add(plot, "rect", { class: "chosen", x: chosen * CELL, y: 0, width: CELL, height: RANGE + STRIP });
    for (const [label, y] of [["1", 8], ["0", RANGE], ["−∞", RANGE + 12]]) {
      add(plot, "text", { x: -4, y, "text-anchor": "end" }, label);
    }
    scores.forEach((score, key) => {
      const top = isHidden(score) ? RANGE + 5 : RANGE - Math.max(1.5, score * RANGE);
      const height = isHidden(score) ? 6 : RANGE - top;
      const name = isHidden(score) ? "never" : "score";
      const place = { x: key * CELL + 1, y: top, width: CELL - 2, height };
      add(plot, "rect", { ...place, class: name, "data-key": key, "data-score": score });
    });
    const spoken = isHidden(scores[chosen]) ? "hidden" : scores[chosen].toFixed(2);
    scoreFigure.setAttribute("aria-valuenow", isHidden(scores[chosen]) ? 0 : scores[chosen]);
    scoreFigure.setAttribute("aria-valuetext", `key ${chosen}: ${spoken}`);
  }

  function drawIntervals(found) {
    const plot = startRows(intervalFigure);
    found.forEach(({ end, far }, key) => {
      const group = add(plot, "g", { "data-key": key, "data-end": end, "data-far": far });
      bar(group, key, [key, end], "attended");
      bar(group, key, [end, far], "runner");
    });
  }

  /** The mask query by query, without the intervals: so that the two pictures agree only if both are right. */
  function drawMask(rule) {
    const plot = startRows(maskFigure);
    const wider = { ...rule, window: rule.window + rule.runnersUp };
    for (let position = 0; position < KEYS; position += 1) {
      const kept = new Set(attended(scores, rule, position));
      for (const key of attended(scores, wider, position)) {
        bar(plot, key, [position, position + 1], kept.has(key) ? "attended" : "runner");
      }
    }
  }

  function describe(found) {
    const { end, far } = found[chosen];
    const score = isHidden(scores[chosen]) ? "hidden (−∞)" : `score ${scores[chosen].toFixed(2)}`;
    const held = end > chosen ? `attended on [${chosen}, ${end})` : "never attended";
    const next = far > end ? `, runner-up on [${end}, ${far})` : "";
    text("key").textContent = `Key ${chosen}, ${score}: ${held}${next}.`;
    const pairs = found.reduce((sum, interval, key) => sum + interval.end - key, 0);
    const causal = (KEYS * (KEYS + 1)) / 2;
    const never = found.filter((interval, key) => interval.end === key).length;
    text("sum").textContent = `${pairs} of ${causal} causal pairs are attended, and ${never} keys never are.`;
  }

  function draw() {
    const rule = settings();
    for (const name of names) {
      input(name).value = rule[name];
      text(name).textContent = rule[name];
    }
    const found = intervals(scores, rule);
    drawScores();
    drawIntervals(found);
    drawMask(rule);
    describe(found);
  }

  const makers = {
    random: () => scores.map(() => hundredths(Math.random())),
    ascending: () => scores.map((_, key) => hundredths((key + 1) / KEYS)),
    descending: () => scores.map((_, key) => hundredths((KEYS - key) / KEYS)),
    ties: () => scores.map(() => [0.25, 0.5, 0.75][Math.floor(Math.random() * 3)]),
    hide: () => {
      const shown = scores.map((_, key) => key).filter((key) => !isHidden(scores[key]));
      const picked = [1, 1, 1, 1].flatMap((one) => shown.splice(Math.floor(Math.random() * shown.length), one));
      return scores.map((score, key) => (picked.includes(key) ? -Infinity : score));
    },
  };
  for (const button of root.querySelectorAll("button[data-scores]")) {
    button.addEventListener("click", () => {
      scores = makers[button.dataset.scores]();
      draw();
    });
  }
  for (const name of names) input(name).addEventListener("input", draw);

  /** The key and the score under the pointer; below the range the key is hidden. */
  function pointed(event) {
    const box = scoreFigure.getBoundingClientRect();
    const unit = (MARGIN.left + SIDE + MARGIN.right) / box.width;
    const key = Math.floor(((event.clientX - box.left) * unit - MARGIN.left) / CELL);
    const y = (event.clientY - box.top) * unit - MARGIN.top;
    const score = y > RANGE + 2 ? -Infinity : hundredths(1 - y / RANGE);
    return { key: Math.min(KEYS - 1, Math.max(0, key)), score };
  }

  /** A fast pointer skips keys: those between two of its places get the scores of the line between them. */
  function paint(from, to) {
    const painted = [...scores];
    const steps = Math.abs(to.key - from.key);
    for (let step = Math.min(1, steps); step <= steps; step += 1) {
      const part = steps === 0 ? 1 : step / steps;
      const line = hundredths(from.score + (to.score - from.score) * part);
      const key = from.key + step * Math.sign(to.key - from.key);
      painted[key] = isHidden(from.score) || isHidden(to.score) ? to.score : line;
    }
    [scores, chosen] = [painted, to.key];
    draw();
  }

  let stroke = null;
  scoreFigure.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    stroke = pointed(event);
    paint(stroke, stroke);
  });
  // On the window: a stroke goes on where the pointer leaves the picture.
  window.addEventListener("pointermove", (event) => {
    if (stroke === null) return;
    const next = pointed(event);
    paint(stroke, next);
    stroke = next;
  });
  for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, () => (stroke = null));

  for (const svg of [intervalFigure, maskFigure]) {
    svg.addEventListener("pointerover", (event) => {
      const row = event.target.closest("[data-row], [data-key]");
      const key = row === null ? chosen : Number(row.dataset.row ?? row.dataset.key);
      if (key === chosen) return;
      chosen = key;
      draw();
    });
  }

  scoreFigure.addEventListener("keydown", (event) => {
    const score = scores[chosen];
    const set = (value) => (scores = scores.with(chosen, value));
    const actions = {
      ArrowLeft: () => (chosen = Math.max(0, chosen - 1)),
      ArrowRight: () => (chosen = Math.min(KEYS - 1, chosen + 1)),
      ArrowUp: () => set(isHidden(score) ? 0 : hundredths(score + 0.05)),
      ArrowDown: () => set(isHidden(score) ? score : hundredths(score - 0.05)),
      Delete: () => set(-Infinity),
    };
    if (!(event.key in actions) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
    draw();
  });
  // The book turns its pages with the arrow keys and opens its sidebar by a swipe, wherever they happen.
  root.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) event.stopPropagation();
  });
  root.addEventListener("touchstart", (event) => event.stopPropagation(), { passive: true });

  draw();
})();
