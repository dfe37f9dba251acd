// All runs of the folder.

import { get, poll } from "../js/api.js";
import { fill, h } from "../js/dom.js";
import { ago, isTraining, percent, score } from "../js/format.js";
import { addPage, link } from "../js/router.js";
import { readingState } from "../js/state.js";

addPage("runs", { title: "Runs", nav: "Runs", show });

async function show({ main, signal }) {
  const state = h("div");
  const body = h("tbody");
  const root = h("p", { class: "muted mono" });
  fill(
    main,
    h("h1", {}, "Runs"),
    root,
    state,
    h("div", { class: "card scroll" }, h("table", {}, h("thead", {}, h("tr", {}, columns())), body)),
  );
  const load = async () => {
    const answer = await get("runs", {}, { signal });
    root.textContent = answer.root;
    fill(state, readingState(answer));
    fill(body, answer.runs.length ? answer.runs.map(row) : emptyRow());
    return !answer.is_complete;
  };
  while (await load());
  return poll(load, 3, (error) => fill(state, h("p", { class: "problem", role: "alert" }, error.message)));
}

function columns() {
  const names = ["Run", "Tasks"];
  const numbers = ["Last step", "Trajectories", "Score, last step", "Success, last step", "Score, all", "Success, all"];
  return [
    names.map((name) => h("th", { scope: "col" }, name)),
    numbers.map((name) => h("th", { scope: "col", class: "number" }, name)),
    h("th", { scope: "col" }, "Changed"),
  ];
}

function row(run) {
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { href: link("run", run.name) }, run.title)),
    h("td", {}, run.tasks.join(", ")),
    h("td", { class: "number" }, isTraining(run) ? (run.last_step ?? "–") : "–"),
    h("td", { class: "number" }, h("a", { href: link("trajectories", "", { run: run.name }) }, run.num_trajectories)),
    h("td", { class: "number" }, score(run.last_score_mean)),
    h("td", { class: "number" }, percent(run.last_success_mean)),
    h("td", { class: "number" }, score(run.score_mean)),
    h("td", { class: "number" }, percent(run.success_mean)),
    h("td", {}, ago(run.modified_at)),
  );
}

function emptyRow() {
  const text = "No runs here: a run is a folder with metrics.jsonl or with trajectory files (.jsonl).";
  return h("tr", {}, h("td", { colspan: 9 }, text));
}
