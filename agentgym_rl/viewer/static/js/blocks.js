// Draws the blocks of panels: agentgym_rl/viewer/panel.py says what each holds.

import { h, svg } from "./dom.js";

const CELL = 24;
const TONES = new Set(["plain", "good", "bad", "next", "muted"]);
const COLOURS = new Set(["red", "green", "blue", "purple", "yellow", "grey"]);

/** An element for each block. */
export function drawBlocks(blocks) {
  return blocks.map((block) => {
    const draw = DRAWERS[block.kind];
    return h(
      "section",
      { class: `block block-${draw ? block.kind : "unknown"}` },
      block.title ? h("h3", {}, block.title) : null,
      draw ? draw(block) : h("p", { class: "muted" }, `This viewer cannot draw ${block.kind}.`),
    );
  });
}

const DRAWERS = {
  text: drawText,
  facts: drawFacts,
  table: drawTable,
  tree: drawTree,
  grid: drawGrid,
  graph: drawGraph,
  meter: drawMeter,
  line: drawLine,
  image: drawImage,
};

function toneOf(tone) {
  return `tone-${TONES.has(tone) ? tone : "plain"}`;
}

function colourOf(colour) {
  return `colour-${COLOURS.has(colour) ? colour : "grey"}`;
}

function drawText({ text, marks }) {
  // Offsets count code points, as Python does; strings here count UTF-16 units.
  const points = Array.from(text);
  const pieces = [];
  let done = 0;
  for (const { start, end, tone } of marks) {
    pieces.push(points.slice(done, start).join(""), h("mark", { class: toneOf(tone) }, points.slice(start, end).join("")));
    done = end;
  }
  return h("p", { class: "words" }, pieces, points.slice(done).join(""));
}

function drawFacts({ rows }) {
  return h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function drawTable({ columns, rows, tones, empty }) {
  if (!rows.length) return h("p", { class: "muted" }, empty);
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col" }, column)))),
    h("tbody", {}, rows.map((row, index) => h("tr", { class: toneOf(tones[index]) }, row.map((cell) => h("td", {}, cell))))),
  );
}

function drawTree({ roots }) {
  return h("ul", { class: "tree" }, roots.map(drawNode));
}

const TONE_WORDS = { good: "done", bad: "wrong", next: "next" };

function drawNode({ label, note, tone, children }) {
  const word = TONE_WORDS[tone];
  return h(
    "li",
    { class: toneOf(tone) },
    h("span", { class: "label" }, label),
    word ? h("span", { class: "visually-hidden" }, ` (${word})`) : null,
    note ? h("span", { class: "note" }, ` ${note}`) : null,
    children.length ? h("ul", {}, children.map(drawNode)) : null,
  );
}

function drawMeter({ value, maximum, title }) {
  const share = maximum > 0 ? Math.min(1, Math.max(0, value / maximum)) : 0;
  const name = { role: "meter", "aria-label": title || "progress", "aria-valuemin": 0, "aria-valuemax": maximum, "aria-valuenow": value };
  return h(
    "div",
    { class: "meter", ...name },
    h("div", { class: "filled", style: { width: `${100 * share}%` } }),
    h("span", {}, `${value} of ${maximum}`),
  );
}

function drawImage({ source, title }) {
  return h("img", { src: source, alt: title || "picture of the state" });
}

// ------------------------------------------------------------------------------------------------------------ drawings

function drawLine({ values, present, title }) {
  const [width, height, edge] = [300, 70, 6];
  const low = Math.min(0, ...values);
  const high = Math.max(low + 1e-9, ...values);
  const x = (index) => edge + ((width - 2 * edge) * index) / Math.max(1, values.length - 1);
  const y = (value) => height - edge - ((height - 2 * edge) * (value - low)) / (high - low);
  const steps = values.flatMap((value, index) => (index ? [`${x(index)},${y(values[index - 1])}`, `${x(index)},${y(value)}`] : [`${x(0)},${y(value)}`]));
  const words = `${title || "values"}: ${values[present]} now, from ${values[0]} to ${values.at(-1)}`;
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "line", role: "img", "aria-label": words },
    svg("polyline", { points: steps.join(" "), fill: "none" }),
    svg("circle", { cx: x(present), cy: y(values[present]), r: 4 }),
    svg("title", {}, words),
  );
}

function drawGrid({ width, height, things, walls, lit, title }) {
  const cells = [];
  for (let number = 0; number < width * height; number += 1) {
    const [x, y] = [number % width, Math.floor(number / width)];
    const kind = walls[number] === "1" ? "wall" : "floor";
    cells.push(svg("rect", { x: x * CELL, y: y * CELL, width: CELL, height: CELL, class: lit[number] === "0" ? `${kind} dim` : kind }));
  }
  const words = things.map((thing) => thing.label).filter(Boolean).join(", ");
  return svg(
    "svg",
    { viewBox: `0 0 ${width * CELL} ${height * CELL}`, class: "grid", role: "img", "aria-label": `${title || "grid"}: ${words}` },
    cells,
    things.map(drawThing),
  );
}

function drawThing(thing) {
  const shape = SHAPES[thing.shape] ?? SHAPES.tile;
  return svg(
    "g",
    { transform: `translate(${thing.x * CELL} ${thing.y * CELL})`, class: `thing ${colourOf(thing.colour)}` },
    shape(thing),
    thing.label ? svg("title", {}, thing.label) : null,
  );
}

const door = (inside) => () => [svg("rect", { x: 2, y: 2, width: 20, height: 20, class: "frame" }), inside];
const SHAPES = {
  tile: ({ label }) => [
    svg("rect", { x: 2, y: 2, width: 20, height: 20, class: "body" }),
    label && Array.from(label).length <= 2 ? svg("text", { x: 12, y: 16, "text-anchor": "middle" }, label) : null,
  ],
  open_door: () => svg("rect", { x: 2, y: 2, width: 6, height: 20, class: "frame" }),
  closed_door: door(svg("circle", { cx: 18, cy: 12, r: 2, class: "body" })),
  locked_door: door(svg("path", { d: "M8 12 h8 M12 8 v8", class: "stroke" })),
  key: () => [svg("circle", { cx: 12, cy: 7, r: 4, class: "frame" }), svg("path", { d: "M12 11 V21 M12 16 H17 M12 20 H16", class: "stroke" })],
  ball: () => svg("circle", { cx: 12, cy: 12, r: 8, class: "body" }),
  box: () => [svg("rect", { x: 4, y: 4, width: 16, height: 16, class: "frame" }), svg("path", { d: "M4 12 H20", class: "stroke" })],
  agent: ({ facing }) => svg("path", { d: "M4 4 L21 12 L4 20 Z", class: "body", transform: `rotate(${90 * facing} 12 12)` }),
};

function drawGraph({ nodes, edges, title }) {
  const [width, height] = [420, 250];
  const place = new Map(nodes.map(([name], index) => {
    const angle = (2 * Math.PI * index) / Math.max(1, nodes.length) - Math.PI / 2;
    return [name, { x: width / 2 + 150 * Math.cos(angle), y: height / 2 + 100 * Math.sin(angle) }];
  }));
  const lines = edges.filter(([one, other]) => place.has(one) && place.has(other)).map(([one, other, tone]) => {
    const [a, b] = [place.get(one), place.get(other)];
    return svg("line", { x1: a.x, y1: a.y, x2: b.x, y2: b.y, class: toneOf(tone) });
  });
  const words = nodes.map(([name, tone]) => (tone === "next" ? `${name} (here)` : name)).join(", ");
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "graph", role: "img", "aria-label": `${title || "graph"}: ${words}` },
    lines,
    nodes.map(([name, tone]) => {
      const { x, y } = place.get(name);
      return svg(
        "g",
        { class: toneOf(tone), transform: `translate(${x} ${y})` },
        svg("circle", { r: 7 }),
        svg("text", { y: -11, "text-anchor": "middle" }, name),
        svg("title", {}, name),
      );
    }),
  );
}
