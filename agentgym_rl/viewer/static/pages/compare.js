// Two trajectories side by side: of two steps, two runs, or two members of a group.

import { get } from "../js/api.js";
import { announce, fill, h } from "../js/dom.js";
import { comparisonView } from "../js/comparison.js";
import { bindAll } from "../js/keys.js";
import { addPage, go, link } from "../js/router.js";

const MOST = 1000;

addPage("compare", { title: "Compare", show, nav: "Compare" });

async function show({ main, parameters, signal }) {
  const [left, right] = [parameters.get("left") ?? "", parameters.get("right") ?? ""];
  const item = parameters.get("item") || (left && (await get(`trajectories/${encodeURIComponent(left)}`, {}, { signal })).summary.item_id);
  const rows = item ? (await get("trajectories", { item: `"${item}"`, sort: "step", limit: MOST }, { signal })).rows : [];
  const area = h("div", {});
  fill(main, h("h1", {}, "Compare"), chooser({ item, left, right, rows }), area);
  if (!left || !right) {
    fill(area, h("p", { class: "muted" }, hint(item, rows)));
    return undefined;
  }
  const answer = await get("compare", { left, right }, { signal });
  return drawn(area, answer, { left, right });
}

function hint(item, rows) {
  if (!item) return "Name an item, or open this page from a trajectory.";
  if (rows.length < 2) return `There are not two trajectories of ${item} here.`;
  return "Choose a trajectory for each side.";
}

function drawn(area, { comparison, summaries, panels }, { left, right }) {
  const headings = summaries.map((summary) => h("a", { href: link("trajectory", summary.id) }, nameOf(summary)));
  const view = comparisonView({ comparison, headings, summaries, panels });
  const [one, other] = summaries.map(({ score }) => score);
  // Of two that scored the same, or of a fault, neither is to be preferred.
  const isPair = one !== null && other !== null && one !== other;
  const pair = `id=${encodeURIComponent(left)}&id=${encodeURIComponent(right)}&threshold=-1e9`;
  fill(
    area,
    h(
      "p",
      { class: "row" },
      h("button", { type: "button", on: { click: () => go(link("compare", "", { left: right, right: left })) } }, "Swap sides (s)"),
      h("a", { href: `/api/export/html?id=${encodeURIComponent(left)}&other=${encodeURIComponent(right)}`, download: "" }, "Save as HTML"),
      isPair && h("a", { href: `/api/export/pairs?${pair}`, download: "" }, "Save as a preference pair"),
    ),
    view.element,
  );
  const step = (by) => {
    const turn = view.select(view.selected() + by);
    view.rows[turn - 1]?.scrollIntoView({ block: "nearest" });
    announce(`Turn ${turn}`);
  };
  const nextDifference = (by) => {
    const next = view.rows.findIndex((row, index) => row.classList.contains("differs") && index + 1 > view.selected());
    const before = view.rows.findLastIndex((row, index) => row.classList.contains("differs") && index + 1 < view.selected());
    const found = by > 0 ? next : before;
    if (found >= 0) step(found + 1 - view.selected());
  };
  return bindAll([
    [["ArrowRight", "j"], "next turn", () => step(1)],
    [["ArrowLeft", "k"], "turn before", () => step(-1)],
    ["n", "next difference", () => nextDifference(1)],
    ["p", "difference before", () => nextDifference(-1)],
    ["s", "swap sides", () => go(link("compare", "", { left: right, right: left }))],
  ]);
}

function nameOf(summary) {
  const run = summary.run === "." ? "" : `${summary.run}, `;
  const trial = summary.num_trials > 1 ? `, trial ${summary.trial}` : "";
  const score = summary.score === null ? summary.stop_reason || "no score" : `score ${summary.score}`;
  return `${run}${summary.phase} step ${summary.step}, sample ${summary.sample_index}${trial}: ${score}`;
}

/** Names of all; those of the same name, such as demonstrations, also tell the line of their file. */
function distinct(rows) {
  const names = rows.map(nameOf);
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return names.map((name, index) => (counts.get(name) > 1 ? `${name} (line ${Number(rows[index].id.split("-").at(-1)) + 1})` : name));
}

function chooser({ item, left, right, rows }) {
  const field = h("input", { type: "text", id: "compare-item", value: item ?? "", spellcheck: "false", placeholder: "textcraft_3" });
  const names = distinct(rows);
  const choose = (name, label, chosen, other) => {
    const select = h(
      "select",
      { id: `compare-${name}`, "aria-label": label },
      h("option", { value: "" }, "choose …"),
      rows.map((row, index) => h("option", { value: row.id, selected: row.id === chosen }, names[index])),
    );
    select.addEventListener("change", () => go(link("compare", "", { item, left: name === "left" ? select.value : other, right: name === "right" ? select.value : other })));
    return select;
  };
  const form = h(
    "form",
    { class: "row" },
    h("label", { for: "compare-item" }, "Item"),
    field,
    h("button", { type: "submit" }, "Show"),
    rows.length ? [choose("left", "Left", left, right), choose("right", "Right", right, left)] : null,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go(link("compare", "", { item: field.value.trim() }));
  });
  return form;
}
