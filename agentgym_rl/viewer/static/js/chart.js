// A line chart over training steps, on uPlot: hover for values, click (or Enter) for the step's trajectories.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { h } from "./dom.js";
import { number } from "./format.js";
import { colour, onThemeChange } from "./theme.js";

const HEIGHT = 210;
const NUM_COLOURS = 8;
const MIN_AXIS = 56;
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const DIGIT = 7; // pixels, in the axes' font

/**
 * A chart called `title`. `draw(lines)` shows `[{label, steps, values, dash, colour}]`, where `colour` counts from 0;
 * drawing the same labels again only renews the data. `openStep(step)` is called for a step that is chosen.
 */
export function chart(title, openStep) {
  const holder = h("div", { class: "plot" });
  const canvasNote = h("p", { class: "visually-hidden" });
  const element = h(
    "figure",
    { class: "card chart", tabindex: 0, role: "group", "aria-label": `${title}: arrow keys move, Enter opens the step` },
    h("figcaption", {}, h("h2", {}, title)),
    holder,
    canvasNote,
  );
  let plot = null;
  let shown = "";
  let lines = [];

  const make = (data) => {
    plot?.destroy();
    const options = {
      width: Math.max(200, holder.clientWidth),
      height: HEIGHT,
      cursor: { focus: { prox: 24 }, drag: { x: true, y: false } },
      legend: { live: true },
      hooks: { setLegend: [() => tellLast()] },
      scales: { x: { time: false, range: stepsOf }, y: { range: rangeOf } },
      axes: [axis({ size: 34, incrs: WHOLE }), axis({ size: widthOf, values: (_, ticks) => ticks.map(number) })],
      series: [{ label: "step", value: (_, value) => (value === null ? "–" : String(value)) }, ...lines.map(seriesOf)],
    };
    plot = new uPlot(options, data, holder);
    plot.over.addEventListener("click", () => open());
  };
  const open = () => {
    const index = plot?.cursor.idx;
    if (index !== null && index !== undefined) openStep(plot.data[0][index]);
  };
  const move = (by) => {
    if (!plot || !plot.data[0].length) return;
    const last = plot.data[0].length - 1;
    const index = Math.min(last, Math.max(0, (plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: HEIGHT / 3 });
    canvasNote.textContent = describe(index);
  };
  const describe = (index) =>
    `step ${plot.data[0][index]}: ${lines.map((line, i) => `${line.label} ${number(plot.data[i + 1][index])}`).join(", ")}`;

  element.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) move(by);
    else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  /** Where nothing is pointed at, the legend tells of the last step. */
  const tellLast = () => {
    if (!plot || (plot.cursor.idx !== null && plot.cursor.idx !== undefined)) return;
    const last = plot.data[0].length - 1;
    plot.setLegend({ idx: last }, false);
    canvasNote.textContent = `Last ${describe(last)}`;
  };
  const resized = new ResizeObserver(() => plot?.setSize({ width: Math.max(200, holder.clientWidth), height: HEIGHT }));
  resized.observe(holder);
  const endTheme = onThemeChange(() => plot && make(plot.data));

  return {
    element,
    draw(next) {
      lines = next.filter((line) => line.values.some((value) => value !== null));
      element.hidden = lines.length === 0;
      if (!lines.length) return;
      const data = joined(lines);
      const kinds = JSON.stringify(lines.map(({ label, dash }) => [label, dash]));
      if (plot && kinds === shown) plot.setData(data);
      else make(data);
      shown = kinds;
      tellLast();
    },
    destroy() {
      resized.disconnect();
      endTheme();
      plot?.destroy();
    },
  };
}

function axis(options) {
  return {
    stroke: colour("--muted"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
    font: "12px system-ui, sans-serif",
    ...options,
  };
}

function seriesOf({ label, dash, colour: index }) {
  return {
    label,
    stroke: colour(`--series-${(index % NUM_COLOURS) + 1}`),
    width: 1.75,
    dash: dash ? [6, 4] : undefined,
    spanGaps: true,
    points: { show: (plot, i) => plot.data[i].filter((value) => value !== null).length <= 60, size: 5 },
    value: (_, value) => number(value),
  };
}

/** Room for the longest label, its tick and gap. */
function widthOf(_, labels) {
  return Math.max(MIN_AXIS, 20 + DIGIT * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

/** From the first step to the last, or those that were chosen; a single one stands in the middle. */
function stepsOf(plot, first, last) {
  const [steps] = plot.data;
  return steps.length === 1 ? [steps[0] - 1, steps[0] + 1] : [first, last];
}

/** A little room above and below; of values that are all alike, from 0. */
function rangeOf(_, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 1.2 * low), Math.max(0, 1.2 * high)];
  const room = 0.08 * (high - low);
  return [low - room, high + room];
}

/** All lines over the union of their steps. */
function joined(lines) {
  return uPlot.join(lines.map(({ steps, values }) => [steps, values]));
}
