// Two trajectories side by side, turn by turn; agentgym_rl/viewer/comparison.py says what the data hold.

import { h } from "./dom.js";
import { panelView } from "./frames.js";
import { outcomeFacts } from "./turns.js";

/**
 * `{element, rows, select}` of a comparison. `headings`: a node or text above each side, `summaries` what lists tell of it. `panels`: for each side what
 * the environment's panel tells, or null. `rows` are the elements of the turns; `select(turn)` marks one and shows it in
 * the panels.
 */
export function comparisonView({ comparison, headings, summaries, panels }) {
  const { opening, rows } = comparison;
  const elements = rows.map((row) => drawRow(row));
  const views = panels.map((panel) => panel && panelView(panel, { brief: true }));
  const states = views.some(Boolean)
    ? h("section", { class: "compared-panels", "aria-label": "State after the turn that is marked" }, pair(views[0]?.element, views[1]?.element))
    : null;
  let selected = 0;
  const select = (turn) => {
    elements[selected - 1]?.removeAttribute("aria-current");
    selected = Math.max(0, Math.min(turn, elements.length));
    elements[selected - 1]?.setAttribute("aria-current", "true");
    views.forEach((view) => view?.show(selected));
    if (states && selected) elements[selected - 1].after(states);
    else if (states) elements[0]?.before(states);
    return selected;
  };
  const element = h(
    "div",
    { class: "comparison" },
    h("p", { class: "verdict" }, verdict(comparison)),
    pair(side(headings[0], summaries[0]), side(headings[1], summaries[1]), "heads"),
    h("details", {}, h("summary", {}, "First observation"), pair(words(opening[0]), words(opening[1]))),
    h("div", { class: "compared-rows" }, states, elements),
  );
  elements.forEach((row, index) => row.addEventListener("click", () => select(index + 1)));
  select(comparison.first_difference ?? 0);
  return { element, rows: elements, select, selected: () => selected };
}

function verdict({ first_difference: first, opening, rows }) {
  if (opening.flat().some(({ changed }) => changed)) return "They begin with different observations.";
  if (first === null) return rows.length ? "Alike in every turn." : "Neither has a turn.";
  return first === 1 ? "They differ from the first turn on." : `Alike up to turn ${first - 1}, different from turn ${first} on.`;
}

function side(heading, summary) {
  return [h("h2", {}, heading), outcomeFacts(summary)];
}

function pair(left, right, kind = "") {
  return h("div", { class: `pair ${kind}` }, h("div", {}, left), h("div", {}, right));
}

function drawRow({ turn, left, right, differs }) {
  return h(
    "section",
    { class: differs ? "compared differs" : "compared", "aria-label": `Turn ${turn}${differs ? ", different" : ""}`, id: `turn-${turn}` },
    h("h3", {}, `Turn ${turn}`, differs ? h("span", { class: "badge" }, "differs") : null),
    pair(drawTurn(left), drawTurn(right)),
  );
}

function drawTurn(turn) {
  if (turn === null) return h("p", { class: "muted" }, "The episode had ended.");
  return [
    labelled("Thought", turn.thought, "thought"),
    labelled("Action", turn.action, "action"),
    labelled("Observation", turn.observation, "observation"),
    h("p", { class: "muted" }, `reward ${turn.reward}${turn.done ? ", done" : ""}${turn.tokens ? `, ${turn.tokens} tokens` : ""}`),
  ];
}

function labelled(label, parts, kind) {
  return parts.length ? h("div", { class: `said ${kind}` }, h("h4", {}, label), words(parts)) : null;
}

function words(parts) {
  return h("p", { class: "words" }, parts.map(({ text, changed }) => (changed ? h("mark", { class: "changed" }, text) : text)));
}
