// One trajectory: its turns as a timeline, what was thought, done and seen, its tokens, and the row itself.

import { get, rawRow } from "../js/api.js";
import { findings } from "../js/diagnosis.js";
import { announce, fill, h } from "../js/dom.js";
import { itemName, number, score, seconds } from "../js/format.js";
import { bindAll } from "../js/keys.js";
import { explanation, isFault, outcome, stopChip } from "../js/outcome.js";
import { player } from "../js/player.js";
import { rawView } from "../js/raw.js";
import { addPage, go, link } from "../js/router.js";
import { tokenView } from "../js/tokens.js";
import { timeline, transcript } from "../js/transcript.js";
import { createPanels } from "../panels/index.js";

addPage("trajectory", { title: "Trajectory", show });

const VIEWS = [
  ["turns", "Turns"],
  ["tokens", "Tokens"],
  ["raw", "Raw"],
];

async function show({ main, argument: id, parameters, setParameters, signal }) {
  const from = parameters.get("from") ?? "";
  const [record, neighbours] = await Promise.all([
    get(`trajectories/${encodeURIComponent(id)}`, {}, { signal }),
    get(`trajectories/${encodeURIComponent(id)}/neighbours?${from}`, {}, { signal }),
  ]);
  const last = record.turns.length;
  const addressOf = (turn) => link("trajectory", id, { turn, from });
  let present = clamp(parameters.get("turn"), 0, last);

  const steps = timeline(record, (turn) => setTurn(turn));
  const text = transcript(record, addressOf);
  const views = { turns: text.element, tokens: null, raw: null };
  let tokens = null;
  const stage = h("div", { class: "stage" });
  const side = h("aside", { class: "panels", tabindex: 0, "aria-label": "Environment", hidden: true });
  const play = player({ last, onTurn: (turn) => setTurn(turn) });
  let panels = [];

  const setTurn = (turn, { scrolls = true } = {}) => {
    present = clamp(turn, 0, last);
    steps.mark(present);
    text.mark(present, scrolls);
    tokens?.mark(present, scrolls);
    play.mark(present);
    panels.forEach((panel) => panel.show(present));
    setParameters({ turn: present || "" });
  };
  const openView = (name) => {
    if (name === "tokens" && !tokens) {
      tokens = tokenView(record);
      views.tokens = tokens.element;
    }
    if (name === "raw") views.raw ??= rawView(record, id);
    fill(stage, views[name]);
    tabs.forEach((tab) => tab.setAttribute("aria-selected", String(tab.dataset.view === name)));
    tabs.forEach((tab) => tab.setAttribute("tabindex", tab.dataset.view === name ? "0" : "-1"));
    stage.setAttribute("aria-labelledby", `tab-${name}`);
    setParameters({ view: name === "turns" ? "" : name });
    setTurn(present);
  };
  const tabs = VIEWS.map(([name, title]) =>
    h("button", { type: "button", role: "tab", id: `tab-${name}`, "data-view": name, "aria-controls": "stage",
      on: { click: () => openView(name), keydown: (event) => tabKey(event, tabs) } }, title),
  );
  stage.id = "stage";
  stage.setAttribute("role", "tabpanel");

  const open = (other) => other && go(link("trajectory", other, { from }));
  const member = (by) => {
    const index = record.group.findIndex((each) => each.id === id);
    open(record.group[index + by]?.id);
  };
  const copy = async () => {
    try {
      await copyText(await rawRow(id, { signal }));
      copyButton.textContent = "Copied";
    } catch (error) {
      copyButton.textContent = `Not copied: ${error.message}`;
    }
    announce(copyButton.textContent);
  };
  const copyButton = h("button", { type: "button", on: { click: copy } }, "Copy as JSON");
  const tools = [
    copyButton,
    h("a", { href: `/api/trajectories/${encodeURIComponent(id)}/raw`, download: `${itemName(record.summary.item_id)}.json` }, "Save JSON"),
    h("a", { href: `/api/export/html?id=${encodeURIComponent(id)}`, download: "" }, "Save as HTML"),
    h("a", { href: link("compare", "", { left: id }) }, "Compare with …"),
  ];

  fill(
    main,
    heading(record, neighbours, { from, tools, addressOf }),
    h("div", { class: "row" }, h("div", { role: "tablist", "aria-label": "Views", class: "tabs" }, tabs), h("span", { class: "spacer" }), play.element),
    h("div", { class: "trajectory" }, steps.element, stage, side),
  );
  openView(VIEWS.some(([name]) => name === parameters.get("view")) ? parameters.get("view") : "turns");
  const unbind = bindAll([
    [" ", "play or pause", () => play.toggle()],
    [["ArrowRight", "j"], "next turn", () => setTurn(present + 1)],
    [["ArrowLeft", "k"], "turn before", () => setTurn(present - 1)],
    ["Home", "before the first turn", () => setTurn(0)],
    ["End", "last turn", () => setTurn(last)],
    ["1", "view: turns", () => openView("turns")],
    ["2", "view: tokens", () => openView("tokens")],
    ["3", "view: raw", () => openView("raw")],
    ["c", "copy as JSON", copy],
    ["n", "next trajectory of the list", () => open(neighbours.next)],
    ["p", "trajectory before in the list", () => open(neighbours.previous)],
    ["]", "next member of the group", () => member(1)],
    ["[", "member before in the group", () => member(-1)],
    ["u", "back to the list", () => go(`#/trajectories?${from || queryOf(record.summary)}`)],
  ]);
  createPanels(record, signal).then((made) => {
    if (signal.aborted || !made.length) return;
    panels = made;
    side.hidden = false;
    fill(side, made.map(({ title, element }) => h("section", { class: "card" }, h("h2", {}, title), element)));
    panels.forEach((panel) => panel.show(present));
  });
  return () => {
    play.stop();
    unbind();
  };
}

function clamp(value, low, high) {
  const chosen = Number.parseInt(value, 10);
  return Number.isNaN(chosen) ? low : Math.min(high, Math.max(low, chosen));
}

function queryOf({ run, step }) {
  return new URLSearchParams({ run, step_min: step, step_max: step }).toString();
}

function tabKey(event, tabs) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  event.stopPropagation();
  const next = tabs[(tabs.indexOf(event.currentTarget) + by + tabs.length) % tabs.length];
  next.focus();
  next.click();
}

/** Also where the clipboard is closed to pages, as it is to those of other machines without TLS. */
async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = h("textarea", { readonly: true }, text);
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

// ------------------------------------------------------------------------------------------------------------ heading

function heading(record, neighbours, { from, tools, addressOf }) {
  const { summary } = record;
  const step = { run: summary.run, step_min: summary.step, step_max: summary.step };
  return h(
    "div",
    { class: "head" },
    h("div", { class: "row" },
      h("h1", {}, itemName(summary.item_id)),
      outcome(summary), stopChip(summary),
      h("span", { class: "spacer" }),
      tools,
      h("a", { href: `#/trajectories?${from || queryOf(summary)}` }, "List"),
      neighbours.total ? h("span", { class: "muted" }, `${number(neighbours.position)} of ${number(neighbours.total)}`) : null,
    ),
    h("p", { class: isFault(summary) ? "problem" : "muted" }, explanation(summary), summary.error ? ` ${summary.error}` : null),
    h("ul", { class: "findings", "aria-label": "What stands out" },
      findings(record).map((finding) => h("li", {}, findingLink(finding, summary, addressOf)))),
    h("div", { class: "row stats" },
      h("a", { href: link("run", summary.run) }, summary.run === "." ? "run" : summary.run),
      h("a", { href: link("trajectories", "", step) }, `${summary.phase} step ${summary.step}`),
      fact("score", score(summary.score), summary.score),
      fact("turns", summary.max_rounds ? `${summary.turns} of ${summary.max_rounds}` : summary.turns),
      fact("tokens", number(summary.tokens)),
      fact("sampled", number(summary.sampled_tokens)),
      fact("time", seconds(summary.duration_s)),
      fact("policy", `version ${summary.policy_version}`),
      record.reflection_reward === null ? null : fact("reflection's reward", number(record.reflection_reward)),
      record.place ? h("span", { class: "muted mono" }, `${record.place[0]}:${record.place[1]}`) : null,
    ),
    record.group.length > 1
      ? h("nav", { class: "row group", "aria-label": "Group" },
          h("span", { class: "muted" }, `Group of ${record.group.length}`),
          record.group.map((each) => groupLink(each, summary.id, from)))
      : null,
  );
}

function findingLink({ text, turn, other }, { id }, addressOf) {
  if (other !== null) return h("a", { href: link("compare", "", { left: id, right: other }) }, text);
  return turn === null ? text : h("a", { href: addressOf(turn) }, text);
}

function fact(name, value, title = null) {
  return h("span", { title }, h("span", { class: "muted" }, `${name} `), value);
}

function groupLink(each, present, from) {
  const tone = isFault(each) ? "bad" : each.success ? "good" : "warn";
  const trial = each.num_trials > 1 ? `.${each.trial}` : "";
  const words = `sample ${each.sample_index}${trial}: ${isFault(each) ? each.stop_reason : score(each.score)}`;
  return h("a", { class: `chip ${tone}`, href: link("trajectory", each.id, { from }), "aria-current": each.id === present ? "true" : null }, words);
}
