// Every token of a trajectory, coloured by what it was worth or how likely it was; exact values for the one pointed at.

import { fill, h } from "./dom.js";
import { number } from "./format.js";

const FIRST_TOKENS = 400;
const MAX_ALPHA = 0.45;
const RED = [214, 40, 40];
const BLUE = [30, 100, 220];
const GREEN = [20, 140, 70];

// [name, title, what it needs, scale]. Scales: "mask"; "low" colours what is far below 0; "signed" both sides; "high".
const COLOURINGS = [
  ["loss_mask", "Loss mask", "mask"],
  ["rollout_log_probs", "Log-probability, engine", "low"],
  ["log_probs", "Log-probability, trainer", "low"],
  ["gap", "Gap, trainer minus engine", "signed"],
  ["advantages", "Advantage", "signed"],
  ["entropies", "Entropy", "high"],
  ["values", "Value", "signed"],
  ["rewards", "Reward", "signed"],
];
const UNITS = { rollout_log_probs: "nats", log_probs: "nats", gap: "nats", entropies: "nats" };

/** The token view; `mark(turn, scrolls)` shows the tokens of the present turn. */
export function tokenView(record) {
  const { tokens } = record;
  if (!tokens) return { element: h("p", { class: "card" }, "This row holds no tokens."), mark() {} };
  const columns = columnsOf(tokens);
  const available = COLOURINGS.filter(([name]) => columns[name]);
  const missing = COLOURINGS.filter(([name]) => !columns[name]).map(([, title]) => title.toLowerCase());
  const sampled = tokens.loss_mask.filter((each) => each === 1).length;
  const inspector = h(
    "div",
    { class: "inspector", "aria-live": "polite" },
    h("p", {}, "Point at a token, or move with the arrow keys, for its exact values."),
  );
  const legend = h("p", { class: "muted legend" });
  const segments = tokens.segments.map(([name, start, end]) => new Segment(name, start, end, tokens, columns));
  const grid = h(
    "div",
    { class: "token-grid", tabindex: 0, role: "group", "aria-label": "Tokens: arrow keys move, values are above" },
    segments.map((segment) => segment.element),
  );
  let chosen = -1;
  let colouring = available[0];

  const inspect = (index) => {
    grid.querySelector(".chosen")?.classList.remove("chosen");
    chosen = index;
    const segment = segments.find((each) => index >= each.start && index < each.end);
    segment.cell(index).classList.add("chosen");
    fill(inspector, h("dl", {}, valuesOf(index, segment, tokens, columns)));
  };
  const colourBy = (name) => {
    colouring = available.find(([each]) => each === name);
    const scale = scaleOf(columns[name], colouring[2]);
    segments.forEach((segment) => segment.colour(columns[name], scale));
    fill(legend, scale.legend);
  };
  const select = h(
    "select",
    { on: { change: (event) => colourBy(event.target.value) } },
    available.map(([name, title]) => h("option", { value: name }, title)),
  );
  grid.addEventListener("pointerover", (event) => {
    const cell = event.target.closest?.("[data-index]");
    if (cell) inspect(Number(cell.dataset.index));
  });
  grid.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.min(tokens.input_ids.length - 1, Math.max(0, chosen + by));
    inspect(next);
    grid.querySelector(".chosen").scrollIntoView({ block: "nearest" });
  });
  colourBy(colouring[0]);
  return {
    element: h(
      "div",
      { class: "tokens" },
      h("div", { class: "card token-tools" },
        h("div", { class: "row stats" },
          h("label", {}, "Colour by ", select),
          h("span", {}, `${number(sampled)} of ${number(tokens.input_ids.length)} tokens are trained on`),
          missing.length ? h("span", { class: "muted" }, `not recorded: ${missing.join("; ")}`) : null),
        legend, inspector),
      grid,
    ),
    mark(turn, scrolls) {
      const name = turn ? `turn ${turn}` : "prompt";
      const present = segments.find((segment) => segment.name === name);
      segments.forEach((segment) => segment.element.classList.toggle("present", segment === present));
      if (scrolls && turn && present?.element.isConnected) present.element.scrollIntoView({ block: "nearest" });
    },
  };
}

/** Values by column name, null where a token has none. */
function columnsOf(tokens) {
  const { loss_mask: mask, rollout_log_probs: engine, values = {} } = tokens;
  const rewards = mask.map((each) => (each ? 0 : null));
  for (const [position, reward] of tokens.token_rewards) rewards[position] = reward;
  const columns = {
    loss_mask: mask,
    rollout_log_probs: engine.map((value, index) => (mask[index] ? value : null)),
    rewards,
    ...values,
  };
  if (columns.log_probs) {
    columns.gap = columns.log_probs.map((value, index) => (value === null ? null : difference(value, engine[index])));
  }
  return columns;
}

/** Of two float32 numbers, without the digits that only their decimals have. */
function difference(one, other) {
  return Number((one - other).toPrecision(6));
}

function scaleOf(values, kind) {
  const known = values.filter((value) => value !== null);
  const size = Math.max(1e-12, ...chunkMaxima(known.map(Math.abs)));
  if (kind === "mask") return { colour: (value) => value && tint(GREEN, 1), legend: "Green: sampled by the model and trained on (1). Plain: prompt and observations (0)." };
  if (kind === "low") return { colour: (value) => tint(RED, value / -size), legend: `The redder, the less likely: from 0 to ${number(-size)} nats.` };
  if (kind === "high") return { colour: (value) => tint(BLUE, value / size), legend: `The bluer, the less certain: from 0 to ${number(size)} nats.` };
  return { colour: (value) => tint(value < 0 ? RED : BLUE, Math.abs(value) / size), legend: `Red below 0, blue above, up to ±${number(size)}.` };
}

/** Maxima of stretches: a call takes only so many arguments. */
function chunkMaxima(values) {
  const maxima = [];
  for (let start = 0; start < values.length; start += 5000) maxima.push(Math.max(...values.slice(start, start + 5000)));
  return maxima;
}

function tint([red, green, blue], share) {
  return `rgb(${red} ${green} ${blue} / ${(MAX_ALPHA * Math.min(1, Math.max(0, share))).toFixed(3)})`;
}

function valuesOf(index, segment, tokens, columns) {
  const entry = (name, value) => [h("dt", {}, name), h("dd", { class: "mono" }, value)];
  return [
    entry("token", tokens.pieces ? JSON.stringify(tokens.pieces[index]) : "no tokenizer found"),
    entry("id", tokens.input_ids[index]),
    entry("position", index),
    entry("message", tokens.sequence_ids[index]),
    entry("segment", segment.name),
    COLOURINGS.filter(([name]) => columns[name]).map(([name, title]) =>
      entry(title.toLowerCase(), columns[name][index] === null ? "–" : `${columns[name][index]} ${UNITS[name] ?? ""}`)),
  ];
}

/** A stretch of tokens of one kind. Of a long one the first tokens are drawn, the others when they are asked for. */
class Segment {
  constructor(name, start, end, tokens, columns) {
    Object.assign(this, { name, start, end, tokens, columns, cells: [], values: null, scale: null });
    this.body = h("div", { class: "cells" });
    this.more = h("button", { type: "button", on: { click: () => this.draw(this.end) } });
    this.element = h(
      "section",
      { class: `card segment ${name.startsWith("turn") ? "sampled" : ""}` },
      h("h2", {}, name, h("span", { class: "muted" }, ` ${number(end - start)} tokens`)),
      this.body,
      this.more,
    );
    this.draw(Math.min(end, start + FIRST_TOKENS));
  }

  draw(until) {
    for (let index = this.start + this.cells.length; index < until; index += 1) {
      const cell = h("span", { class: this.tokens.pieces ? "token" : "token id", "data-index": index }, shown(this.tokens, index));
      this.cells.push(cell);
      this.body.append(cell);
      if (this.scale) this.paint(index);
    }
    const left = this.end - this.start - this.cells.length;
    this.more.hidden = left === 0;
    this.more.textContent = `Show the other ${number(left)} tokens`;
  }

  colour(values, scale) {
    Object.assign(this, { values, scale });
    this.cells.forEach((_, place) => this.paint(this.start + place));
  }

  paint(index) {
    const value = this.values[index];
    this.cells[index - this.start].style.backgroundColor = value === null ? "" : this.scale.colour(value) || "";
  }

  cell(index) {
    if (index - this.start >= this.cells.length) this.draw(Math.min(this.end, index + FIRST_TOKENS));
    return this.cells[index - this.start];
  }
}

function shown(tokens, index) {
  if (!tokens.pieces) return tokens.input_ids[index];
  const piece = tokens.pieces[index];
  return piece === "" ? "∅" : piece.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}
