// Items over a run: how often each was tried and succeeded. The filters are those of the list of trajectories.

import { get, poll } from "../js/api.js";
import { fill, h } from "../js/dom.js";
import { itemName, number, percent, score } from "../js/format.js";
import { addPage, link } from "../js/router.js";
import { readingState } from "../js/state.js";

addPage("items", { title: "Items", show });

const PAGE = 100;
const COLUMNS = [
  ["item_id", "Item", false], ["", "Goal", false], ["tries", "Tries", true], ["success_mean", "Success", true],
  ["score_mean", "Score", true], ["groups", "Groups", true], ["groups_alike", "Groups alike", true],
];

async function show({ main, parameters, setParameters, signal }) {
  const query = Object.fromEntries([...parameters.keys()].map((name) => [name, parameters.getAll(name)]));
  const state = h("div");
  const pager = h("div", { class: "row" });
  const head = h("tr");
  const body = h("tbody");
  let mark = 0;
  let shown = "";

  const load = async () => {
    const mine = ++mark;
    const answer = await get("items", { ...query, limit: PAGE }, { signal });
    if (mine !== mark) return false; // a later question is under way
    fill(state, readingState(answer));
    const drawn = JSON.stringify([answer.rows, answer.total, query]);
    if (drawn === shown) return !answer.is_complete || answer.unchecked > 0;
    shown = drawn;
    fill(pager, pages(answer));
    fill(head, COLUMNS.map(header));
    fill(body, answer.rows.length ? answer.rows.map((row) => itemRow(row, query)) : h("tr", {}, h("td", { colspan: COLUMNS.length }, "No trajectory passes these filters.")));
    return !answer.is_complete || answer.unchecked > 0;
  };
  const fail = (error) => {
    if (!signal.aborted) fill(state, h("p", { class: "problem", role: "alert" }, error.message));
  };
  const change = (changes) => {
    Object.assign(query, changes);
    setParameters(query);
    load().catch(fail);
  };
  const isDescending = () => query.descending?.[0] === "true";
  const header = ([name, title, isNumber]) => {
    const isSorted = (query.sort?.[0] ?? "item_id") === name;
    const direction = isDescending() ? "descending" : "ascending";
    const sortBy = () => change({ sort: [name], descending: isSorted && !isDescending() ? ["true"] : [], offset: [] });
    const words = [title, isSorted ? h("span", { "aria-hidden": "true" }, isDescending() ? " ↓" : " ↑") : null];
    return h(
      "th",
      { scope: "col", class: isNumber ? "number" : null, "aria-sort": isSorted ? direction : null },
      name ? h("button", { type: "button", on: { click: sortBy } }, words) : title,
    );
  };
  const pages = ({ total, offset, rows }) => {
    const turn = (by) => change({ offset: offset + by > 0 ? [offset + by] : [] });
    return [
      h("span", { class: "total" }, total ? `${number(offset + 1)}–${number(offset + rows.length)} of ${number(total)} items` : "0"),
      h("button", { type: "button", disabled: offset === 0, on: { click: () => turn(-PAGE) } }, "Previous page"),
      h("button", { type: "button", disabled: offset + rows.length >= total, on: { click: () => turn(PAGE) } }, "Next page"),
      h("a", { href: link("trajectories", "", filtersOf(query)) }, "Their trajectories"),
    ];
  };

  fill(
    main,
    h("h1", {}, "Items"),
    query.run ? h("p", {}, h("a", { href: link("run", query.run[0]) }, query.run[0] === "." ? "run" : query.run[0])) : null,
    state,
    pager,
    h("div", { class: "card scroll" }, h("table", { class: "list" }, h("thead", {}, head), body)),
    h("p", { class: "muted" }, "Groups alike: all members scored the same, so that nothing is learned from them."),
  );
  while (await load());
  return poll(load, 5, fail);
}

/** The filters without what belongs to this list alone. */
function filtersOf(query) {
  return { ...query, sort: [], descending: [], offset: [] };
}

function itemRow(row, query) {
  const address = link("trajectories", "", { ...filtersOf(query), task: row.task, item: `"${row.item_id}"` });
  const tries = row.faults ? `${number(row.tries)} (${number(row.faults)} faults)` : number(row.tries);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { href: address }, itemName(row.item_id))),
    h("td", {}, row.goal, row.category ? h("span", { class: "muted" }, ` ${row.category}`) : null),
    h("td", { class: "number" }, tries),
    h("td", { class: "number" }, percent(row.success_mean)),
    h("td", { class: "number", title: row.score_mean }, score(row.score_mean)),
    h("td", { class: "number" }, number(row.groups)),
    h("td", { class: "number" }, number(row.groups_alike)),
  );
}
