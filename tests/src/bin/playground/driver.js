// Drives the playground page of the book, and posts what it saw. It stands first in the page's head, so that it hears
// of the errors of every other script.
(() => {
  "use strict";

  const errors = [];
  const note = (kind) => (...what) => errors.push(`${kind}: ${what.map(String).join(" ")}`);
  // Capturing: the errors of elements that do not load stay at the element.
  window.addEventListener(
    "error",
    (event) => note("error")(event.error?.stack ?? event.message ?? event.target?.outerHTML),
    true,
  );
  window.addEventListener("unhandledrejection", (event) => note("rejection")(event.reason));
  for (const level of ["error", "assert"]) {
    const plain = console[level];
    console[level] = (...what) => {
      if (level !== "assert" || !what[0]) note(`console.${level}`)(...what);
      plain.apply(console, what);
    };
  }

  // The book turns its pages with the arrow keys. This stands before it, so that a key that it would hear is counted.
  let heard = 0;
  document.addEventListener("keydown", (event) => {
    heard += 1;
    event.stopImmediatePropagation();
  });

  /** Calls the functions of the page with frozen arguments: what they returned, or the text of what they threw. */
  function results({ scores, ...numbers }) {
    const frozen = Object.freeze(scores.map(Number));
    const rule = Object.freeze(numbers);
    try {
      const found = window.flashDma.intervals(frozen, rule);
      const kept = frozen.map((_, position) => window.flashDma.attended(frozen, rule, position));
      return {
        ends: found.map(({ end }) => end),
        fars: found.map(({ far }) => far),
        attended: kept.map((keys) => keys.sort((a, b) => a - b)),
      };
    } catch (thrown) {
      return { refused: `${thrown.name}: ${thrown.message}` };
    }
  }

  const root = () => document.getElementById("interval-playground");
  const figure = (name) => root().querySelector(`svg[data-figure="${name}"]`);
  const input = (name) => root().querySelector(`input[name="${name}"]`);
  const output = (name) => root().querySelector(`output[data-text="${name}"]`);
  const names = ["window", "recent", "sinks", "runnersUp"];

  /** Where a rectangle of a picture begins and ends, in cells. */
  function cells(rect) {
    const [x, width] = ["x", "width"].map((name) => Number(rect.getAttribute(name)) / 10);
    return [Math.round(x), Math.round(x + width)];
  }

  const row = (rect) => Math.floor(Number(rect.getAttribute("y")) / 10);

  /** The bars of a key as they are drawn, apart from what its attributes say. */
  function drawn(bar) {
    const key = Number(bar.dataset.key);
    const place = (name) => {
      const rects = [...bar.querySelectorAll(`.${name}`)];
      if (rects.length > 1 || rects.some((rect) => row(rect) !== key)) note("drawn")(bar.outerHTML);
      return rects.length === 0 ? null : cells(rects[0]);
    };
    return { attended: place("attended"), runner: place("runner") };
  }

  /** What the page shows: numbers, scores, bars, and the pairs of the mask as `[key, query]`. */
  function state(step) {
    const pairs = (name) =>
      [...figure("mask").querySelectorAll(`.${name}`)].map((rect) => {
        const [from, to] = cells(rect);
        if (to !== from + 1) note("mask")(rect.outerHTML);
        return [row(rect), from];
      });
    const shown = names.map((name) => [name, Number(input(name).value)]);
    for (const [name, value] of shown) {
      if (output(name).textContent !== String(value)) note("output")(name, output(name).textContent, value);
    }
    const range = figure("scores").querySelector(".seen").getBoundingClientRect();
    const scoreBars = [...figure("scores").querySelectorAll("[data-score]")];
    const height = (bar) => {
      const box = bar.getBoundingClientRect();
      return box.top > range.bottom ? null : (range.bottom - box.top) / range.height;
    };
    return {
      step,
      rule: Object.fromEntries(shown),
      scores: scoreBars.map((bar) => bar.dataset.score),
      heights: scoreBars.map(height),
      bars: [...figure("intervals").querySelectorAll("[data-end]")].map((bar) => ({
        key: Number(bar.dataset.key),
        end: Number(bar.dataset.end),
        far: Number(bar.dataset.far),
        ...drawn(bar),
      })),
      mask: { attended: pairs("attended"), runner: pairs("runner") },
    };
  }

  /** Moves a range input as a user would: its value, then its event. */
  function move(name, value) {
    input(name).value = value;
    input(name).dispatchEvent(new Event("input", { bubbles: true }));
  }

  /** Sends a pointer event to a place of the score picture: x counts keys, y is a score, or −1 for below the range. */
  function point(type, key, score) {
    const svg = figure("scores");
    const bars = [...svg.querySelectorAll("[data-score]")].map((bar) => bar.getBoundingClientRect());
    const range = svg.querySelector(".seen").getBoundingClientRect();
    const place = {
      clientX: bars[key].x + bars[key].width / 2,
      clientY: score < 0 ? range.bottom + 8 : range.bottom - score * range.height,
    };
    const options = { ...place, bubbles: true, cancelable: true, pointerId: 1, isPrimary: true, button: 0 };
    // A stroke goes where the pointer is, which a picture cannot hold: the moves go to the document.
    const target = type === "pointerdown" ? document.elementFromPoint(place.clientX, place.clientY) : document;
    target.dispatchEvent(new PointerEvent(type, { ...options, buttons: type === "pointerup" ? 0 : 1 }));
  }

  /** Draws a stroke over the scores, from place to place. */
  function stroke(...places) {
    figure("scores").scrollIntoView({ block: "center" });
    places.forEach(([key, score], at) => point(at === 0 ? "pointerdown" : "pointermove", key, score));
    point("pointerup", ...places.at(-1));
  }

  function press(key, target) {
    target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  }

  /** Every step, and the page after each. */
  function drive(moves) {
    const states = [state("start")];
    for (const [name, value] of moves) {
      move(name, value);
      states.push(state(`move ${name} ${value}`));
    }
    const after = (step, act) => {
      act();
      states.push(state(step));
    };
    after("stroke up", () => stroke([3, 0.2], [9, 0.95], [20, 0.95]));
    after("stroke back", () => stroke([30, 0.5], [12, 0.05]));
    after("stroke point", () => stroke([5, 1]));
    after("stroke hides", () => stroke([14, -1], [18, -1]));
    for (const button of root().querySelectorAll("button")) {
      after(`press ${button.dataset.scores}`, () => button.click());
    }
    const scores = figure("scores");
    press("ArrowLeft", scores);
    for (const key of ["ArrowUp", "ArrowRight", "Delete", "ArrowUp", "ArrowRight", "ArrowDown"]) {
      after(`key ${key}`, () => press(key, scores));
    }
    heard = 0;
    for (const target of [scores, ...names.map(input)]) press("ArrowRight", target);
    if (heard > 0) note("keys")(`the book heard ${heard} arrow keys of the playground`);
    return states;
  }

  async function run() {
    const report = {};
    try {
      const { cases, moves } = await (await fetch("/drive/cases.json")).json();
      report.cases = cases.map(results);
      report.states = drive(moves);
      report.width = [document.documentElement.scrollWidth, document.documentElement.clientWidth];
    } catch (thrown) {
      note("driver")(thrown.stack);
    }
    // Errors are reported as tasks of their own.
    await new Promise((resolve) => setTimeout(resolve, 100));
    await fetch("/drive/report", { method: "POST", body: JSON.stringify({ ...report, errors }) });
  }

  window.addEventListener("load", run);
})();
