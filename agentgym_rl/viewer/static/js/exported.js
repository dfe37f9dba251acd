// The start of an exported file: draws the data that stand in it.

import { add, h } from "./dom.js";
import { panelView } from "./frames.js";
import { comparisonView } from "./comparison.js";
import { outcomeFacts, turnsView } from "./turns.js";

const main = document.getElementById("main");
const data = JSON.parse(document.getElementById("data").textContent);

function showTrajectory({ heading, summary, messages, turns, panel }) {
  const list = turnsView({ messages, turns });
  const side = panel && panelView(panel);
  add(
    main,
    h("h1", {}, heading),
    outcomeFacts(summary),
    side ? h("p", { class: "muted" }, "Click a turn, or press → and ←, to see the environment after it.") : null,
    h("div", { class: side ? "pair" : "" }, list.element, side ? h("aside", { class: "sticky", tabindex: 0, "aria-label": "Environment" }, side.element) : null),
  );
  side?.show(0);
  list.sections.forEach((section, index) => section.addEventListener("click", () => step(index + 1)));
  const step = (turn) => side?.show(list.select(turn));
  followKeys(list, step);
}

function showComparison(data) {
  const view = comparisonView(data);
  add(main, h("h1", {}, "Comparison"), view.element);
  followKeys(view, view.select);
}

function followKeys(view, step) {
  addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, j: 1, ArrowLeft: -1, k: -1 }[event.key];
    if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    step(view.selected() + by);
    document.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  });
}

if (data.kind === "comparison") showComparison(data);
else showTrajectory(data);
