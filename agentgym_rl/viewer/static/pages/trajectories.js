// The list of trajectories: filters, text search, order, groups, pages. All of it stands in the address.

import { get, poll } from "../js/api.js";
import { announce, fill, h } from "../js/dom.js";
import { itemName, number, percent, score, seconds } from "../js/format.js";
import { bindAll } from "../js/keys.js";
import { addPage, go, link } from "../js/router.js";
import { outcome, stopChip } from "../js/outcome.js";
import { readingState } from "../js/state.js";

addPage("trajectories", { title: "Trajectories", nav: "Trajectories", show });

const PAGE = 100;
const TYPING_MS = 250;
const FILTERS = [
  "run", "phase", "task", "item", "uid", "step_min", "step_max", "score_min", "score_max", "success", "stop",
  "turns_min", "turns_max", "tokens_min", "tokens_max", "text", "goal", "grouped",
];
const GOALS = [
  ["reached", "reached"], ["unreached", "not reached"], ["contradicted", "unlike the result"],
];
const COLUMNS = [
  ["step", "Step", true], ["item_id", "Item", false], ["uid", "Sample", false], ["score", "Score", true],
  ["success", "Result", false], ["stop_reason", "Ended by", false], ["turns", "Turns", true], ["tokens", "Tokens", true],
  ["sampled_tokens", "Sampled", true], ["duration_s", "Time", true],
];

async function show({ main, parameters, setParameters, signal }) {
  const query = Object.fromEntries(
    [...FILTERS, "sort", "descending", "offset"].map((name) => [name, parameters.getAll(name).filter(Boolean)]),
  );
  const list = listView();
  const state = h("div");
  const pager = h("div", { class: "row" });
  let shown = { total: 0, offset: 0, rows: [] };
  let version = -1;
  let turnOf = 0;

  const load = async () => {
    const mine = ++turnOf;
    const answer = await get("trajectories", { ...query, limit: PAGE }, { signal });
    if (mine !== turnOf) return false; // a later question is under way
    fill(state, readingState(answer));
    if (answer.version !== version || answer.total !== shown.total || answer.offset !== shown.offset) {
      shown = answer;
      version = answer.version;
      list.draw(shown.rows, query, sortBy);
      fill(pager, pages());
    }
    // What is still to be looked at joins a list that can be read meanwhile.
    if (answer.is_complete) list.element.setAttribute("aria-busy", "false");
    return !answer.is_complete || answer.unchecked > 0;
  };
  const loadAll = async () => {
    while (await load());
    list.element.setAttribute("aria-busy", "false");
  };
  const change = (changes) => {
    Object.assign(query, changes);
    setParameters(query);
    version = -1;
    list.element.setAttribute("aria-busy", "true");
    loadAll()
      .then(() => announce(`${shown.total} trajectories`))
      .catch(fail);
  };
  const fail = (error) => {
    if (!signal.aborted) fill(state, h("p", { class: "problem", role: "alert" }, error.message));
  };
  const sortBy = (column) => {
    const isSame = (query.sort[0] ?? "step") === column;
    change({ sort: [column], descending: isSame && !query.descending.length ? ["true"] : [], offset: [] });
  };
  const turnPage = (by) => {
    const offset = shown.offset + by * PAGE;
    if (offset < 0 || offset >= shown.total) return;
    change({ offset: offset ? [offset] : [] });
    scrollTo(0, 0);
  };
  const pages = () => {
    const last = Math.min(shown.total, shown.offset + PAGE);
    return [
      h("span", { class: "total" }, shown.total ? `${number(shown.offset + 1)}–${number(last)} of ${number(shown.total)}` : "0"),
      h("button", { type: "button", disabled: shown.offset === 0, on: { click: () => turnPage(-1) } }, "Previous page"),
      h("button", { type: "button", disabled: last >= shown.total, on: { click: () => turnPage(1) } }, "Next page"),
      h("a", { href: link("items", "", { ...query, sort: [], descending: [], offset: [], grouped: [] }) }, "By item"),
      h("a", { href: link("export", "", query) }, "Export these …"),
    ];
  };

  const formHolder = h("div", { class: "form-holder" });
  let form = null;
  let isSearchAwaited = false; // "/" was pressed before the form was there
  const showForm = async () => {
    const facets = await get("facets", {}, { signal });
    if (formHolder.contains(document.activeElement)) return; // somebody is using it
    form = filterForm(query, facets, (changes) => change({ ...changes, offset: [] }));
    fill(formHolder, form.element);
    if (isSearchAwaited) form.focusText();
    isSearchAwaited = false;
  };
  const search = () => {
    isSearchAwaited = form === null;
    form?.focusText();
  };
  fill(main, h("h1", {}, "Trajectories"), formHolder, state, pager, list.element);
  const unbind = bindAll([
    ["/", "search in texts", search],
    [["j", "ArrowDown"], "next row", () => list.move(1)],
    [["k", "ArrowUp"], "row before", () => list.move(-1)],
    [["Enter", "o"], "open the row", () => list.open()],
    ["n", "next page", () => turnPage(1)],
    ["p", "page before", () => turnPage(-1)],
  ]);
  const wasComplete = !(await Promise.all([load(), showForm()]))[0];
  await loadAll();
  if (!wasComplete) await showForm(); // files that were read meanwhile may bring further choices
  const stop = poll(load, 3, fail);
  return () => {
    stop();
    unbind();
  };
}

// ------------------------------------------------------------------------------------------------------------ filters

function filterForm(query, facets, onChange) {
  const text = field("search", "text", "Text", { placeholder: "anywhere in a message", size: "wide" });
  const fields = [
    text,
    choice("run", "Run", facets.runs.map((name) => [name, name === "." ? facets.root : name])),
    choice("phase", "Phase", facets.phases.map((name) => [name, name])),
    choice("task", "Task", facets.tasks.map((name) => [name, name])),
    field("text", "item", "Item", { placeholder: 'part, or "all of it"' }),
    range("step", "Step"),
    range("score", "Score"),
    choice("success", "Success", [["true", "yes"], ["false", "no"]]),
    choice("goal", "Goal, by the panel", GOALS),
    choice("stop", "Ended by", facets.stop_reasons.map((name) => [name, name || "unknown"])),
    range("turns", "Turns"),
    range("tokens", "Tokens"),
    query.uid.length ? field("text", "uid", "Group", {}) : null,
    check("grouped", "Group members together"),
    h("button", { type: "button", on: { click: clear } }, "Clear"),
  ];
  const element = h(
    "form",
    { class: "card filters", role: "search", "aria-label": "Filters", on: { submit: (event) => event.preventDefault(), input } },
    fields,
  );
  let timer = 0;

  function input(event) {
    const typed = event.target.matches("input:not([type=checkbox])");
    clearTimeout(timer);
    timer = setTimeout(() => onChange(values()), typed ? TYPING_MS : 0);
  }
  function values() {
    return Object.fromEntries(
      [...element.querySelectorAll("[name]")].map((each) => {
        const value = each.type === "checkbox" ? (each.checked ? "true" : "") : each.value.trim();
        return [each.name, value ? [value] : []];
      }),
    );
  }
  function clear() {
    for (const each of element.querySelectorAll("[name]")) {
      if (each.type === "checkbox") each.checked = false;
      else each.value = "";
    }
    onChange(values());
  }
  function field(type, name, label, { placeholder = null, size = "" }) {
    const value = query[name][0] ?? null;
    return h("label", { class: size }, label, h("input", { type, name, value, placeholder, autocomplete: "off", spellcheck: "false" }));
  }
  function range(name, label) {
    const ends = [["min", "from"], ["max", "to"]].map(([end, word]) =>
      h("input", {
        type: "number", step: "any", name: `${name}_${end}`, value: query[`${name}_${end}`][0] ?? null,
        placeholder: word, "aria-label": `${label} ${word}`,
      }),
    );
    return h("div", { class: "range", role: "group", "aria-label": label }, h("span", {}, label), h("span", { class: "ends" }, ends));
  }
  function choice(name, label, options) {
    const chosen = query[name][0] ?? "";
    const known = options.some(([value]) => value === chosen) || !chosen ? options : [...options, [chosen, chosen]];
    return h(
      "label",
      {},
      label,
      h("select", { name }, h("option", { value: "" }, "all"), known.filter(([value]) => value !== "").map(([value, shown]) =>
        h("option", { value, selected: value === chosen }, shown))),
    );
  }
  function check(name, label) {
    return h("label", { class: "check" }, h("input", { type: "checkbox", name, checked: query[name][0] === "true" }), label);
  }
  return { element, focusText: () => text.querySelector("input").focus() };
}

// -------------------------------------------------------------------------------------------------------------- table

function listView() {
  const head = h("tr");
  const body = h("tbody");
  const element = h(
    "div",
    { class: "card scroll", "aria-busy": "true" },
    h("table", { class: "list" }, h("thead", {}, head), body),
  );
  let links = [];
  let chosen = -1;

  const choose = (index) => {
    links[chosen]?.closest("tr").classList.remove("chosen");
    chosen = index;
    const row = links[chosen]?.closest("tr");
    row?.classList.add("chosen");
    row?.scrollIntoView({ block: "nearest" });
    links[chosen]?.focus({ preventScroll: true });
  };
  return {
    element,
    draw(rows, query, sortBy) {
      const pageOf = (row) => row?.href.split("?")[0]; // what follows are the filters, which may just have changed
      const keep = pageOf(links[chosen]);
      const hadFocus = links[chosen] === document.activeElement;
      fill(head, COLUMNS.map((column) => header(column, query, sortBy)));
      fill(body, rows.length ? rowsOf(rows, query) : h("tr", {}, h("td", { colspan: COLUMNS.length }, "No trajectory passes these filters.")));
      links = [...body.querySelectorAll("a.open")];
      chosen = links.findIndex((each) => pageOf(each) === keep);
      if (chosen >= 0) {
        links[chosen].closest("tr").classList.add("chosen");
        if (hadFocus) links[chosen].focus({ preventScroll: true });
      }
    },
    move(by) {
      if (links.length) choose(Math.min(links.length - 1, Math.max(0, chosen + by)));
    },
    open() {
      if (links.length) go(links[Math.max(0, chosen)].getAttribute("href"));
    },
  };
}

function header([name, title, isNumber], query, sortBy) {
  const isSorted = (query.sort[0] ?? "step") === name;
  const direction = query.descending.length ? "descending" : "ascending";
  return h(
    "th",
    { scope: "col", class: isNumber ? "number" : null, "aria-sort": isSorted ? direction : null },
    h("button", { type: "button", on: { click: () => sortBy(name) } }, title,
      isSorted ? h("span", { "aria-hidden": "true" }, direction === "ascending" ? " ↑" : " ↓") : null),
  );
}

function rowsOf(rows, query) {
  const filters = new URLSearchParams();
  for (const name of [...FILTERS, "sort", "descending"]) query[name].forEach((value) => filters.append(name, value));
  const isGrouped = query.grouped.length > 0;
  return rows.flatMap((row, index) => [
    isGrouped && (index === 0 || !isSameGroup(row, rows[index - 1])) ? groupRow(row, rows.filter((each) => isSameGroup(each, row))) : null,
    trajectoryRow(row, filters.toString()),
  ]);
}

function isSameGroup(one, other) {
  return ["run", "phase", "step", "uid"].every((name) => one[name] === other[name]);
}

function groupRow(row, members) {
  const scores = members.map((each) => each.score).filter((each) => each !== null);
  const mean = scores.length ? scores.reduce((sum, each) => sum + each, 0) / scores.length : null;
  const successes = members.filter((each) => each.success).length;
  return h(
    "tr",
    { class: "group" },
    h("th", { colspan: COLUMNS.length, scope: "rowgroup" },
      h("a", { href: link("trajectories", "", { run: row.run, uid: row.uid, grouped: true }) }, row.uid),
      ` · step ${row.step} · ${members.length} members here · score ${score(mean)} · success ${percent(successes / members.length)}`),
  );
}

function trajectoryRow(row, from) {
  const sample = `${row.sample_index}${row.num_trials > 1 ? ` (trial ${row.trial})` : ""}`;
  const phase = row.phase === "train" ? "" : `${row.phase} `;
  return h(
    "tr",
    {},
    h("td", { class: "number" }, `${phase}${row.step}`),
    h("td", {}, h("a", { class: "open", href: link("trajectory", row.id, { from }) }, itemName(row.item_id))),
    h("td", {}, sample),
    h("td", { class: "number", title: row.score }, score(row.score)),
    h("td", {}, outcome(row)),
    h("td", {}, stopChip(row)),
    h("td", { class: "number" }, row.max_rounds ? `${row.turns}/${row.max_rounds}` : row.turns),
    h("td", { class: "number" }, number(row.tokens)),
    h("td", { class: "number" }, number(row.sampled_tokens)),
    h("td", { class: "number" }, seconds(row.duration_s)),
  );
}
