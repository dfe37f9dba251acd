// One run: its curves, live while it trains, and the ways from there to its trajectories.

import { get, poll } from "../js/api.js";
import { chart } from "../js/chart.js";
import { fill, h } from "../js/dom.js";
import { ago, isTraining, percent, score } from "../js/format.js";
import { addPage, go, link } from "../js/router.js";
import { readingState } from "../js/state.js";

addPage("run", { title: "Run", show });

// What is drawn at once; a key that ends in a slash stands for all below it that are not always 0.
const CHARTS = [
  ["Reward", ["rollout/score_mean", "val/score_mean"]],
  ["Success", ["rollout/success_mean", "val/success_mean"]],
  ["Turns and horizon", ["rollout/turns_mean", "rollout/turns_max", "rounds/max_rounds"]],
  ["Groups without signal", ["rollout/groups_without_signal", "rollout/groups"]],
  ["Stop reasons, share", ["rollout/stop/"]],
  ["Entropy", ["actor/entropy"]],
  ["KL", ["actor/kl_loss", "actor/ppo_kl", "rollout/kl_mean"]],
  ["Gap between engine and trainer", ["training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"]],
  ["Gradient norm", ["actor/grad_norm"]],
  ["Tokens", ["rollout/tokens_mean", "rollout/sampled_tokens_mean"]],
  ["Seconds of a step", ["timing_s/step", "timing_s/gen", "timing_s/update"]],
];
const LIVE_S = 120;

async function show({ main, argument, parameters, setParameters, signal }) {
  const run = argument || ".";
  const others = parameters.getAll("with").filter((name) => name !== run);
  const added = parameters.getAll("metric");
  const feeds = [run, ...others].map((name) => new Feed(name, signal));
  const charts = [...CHARTS, ...added.map((key) => [key, [key]])].map(([title, keys]) => ({
    keys,
    ...chart(title, (step) => go(link("trajectories", "", { run, step_min: step, step_max: step }))),
  }));
  const head = h("div");
  const tools = h("div", { class: "row tools" });
  const problem = h("div");
  fill(main, head, problem, tools, h("div", { class: "charts" }, charts.map(({ element }) => element)));

  const load = async () => {
    const { runs, ...state } = await get("runs", {}, { signal });
    const known = runs.find(({ name }) => name === run);
    if (!known && state.is_complete) throw new Error(`The run “${run}” is not here, or not any more.`);
    if (!known) return true;
    const keys = [...new Set(charts.flatMap((each) => each.keys))];
    await Promise.all(feeds.map((feed) => feed.update(keys)));
    fill(head, heading(known));
    fill(problem, readingState(state));
    if (!tools.childElementCount) fill(tools, choices(runs, feeds[0].names));
    charts.forEach((each) => each.draw(linesOf(feeds, each.keys)));
    return !state.is_complete;
  };
  const choices = (runs, names) => [
    select("Compare with", runs.map(({ name, title }) => [name, title]).filter(([name]) => name !== run), others, (chosen) =>
      reopen({ with: toggled(others, chosen) }),
    ),
    select("Add a curve", names.map((name) => [name, name]), added, (chosen) =>
      reopen({ metric: toggled(added, chosen) }),
    ),
    [...others, ...added].map((name) =>
      h("button", { type: "button", class: "chip", "aria-label": `Remove ${name}`, on: { click: () => reopen({
        with: others.filter((each) => each !== name), metric: added.filter((each) => each !== name),
      }) } }, `${name} ×`),
    ),
  ];
  const reopen = (changes) => {
    setParameters(changes);
    dispatchEvent(new HashChangeEvent("hashchange"));
  };
  while (await load());
  const stop = poll(load, 2, (error) => fill(problem, h("p", { class: "problem", role: "alert" }, error.message)));
  return () => {
    stop();
    charts.forEach(({ destroy }) => destroy());
  };
}

/** A run's metrics, of which only new rows are asked for. */
class Feed {
  constructor(run, signal) {
    Object.assign(this, { run, signal, generation: null, steps: [], series: new Map(), names: [] });
  }

  async update(wanted) {
    const keys = this.names.filter((name) => wanted.some((key) => matches(name, key)));
    const isComplete = keys.length === this.series.size && keys.length > 0;
    const answer = await this.ask(isComplete ? keys : [], isComplete ? this.steps.length : 0);
    const goesOn = isComplete && answer.generation === this.generation && !answer.is_derived
      && answer.num_rows === this.steps.length + answer.steps.length && answer.keys.length === this.names.length;
    this.names = answer.keys;
    if (goesOn) {
      this.steps.push(...answer.steps);
      for (const key of keys) this.series.get(key).push(...answer.series[key]);
      return;
    }
    const all = this.names.filter((name) => wanted.some((key) => matches(name, key)));
    const whole = await this.ask(all, 0);
    Object.assign(this, { generation: whole.generation, steps: whole.steps, names: whole.keys });
    this.series = new Map(all.map((key) => [key, whole.series[key]]));
  }

  ask(keys, after) {
    return get("metrics", { run: this.run, key: keys, after }, { signal: this.signal });
  }
}

function matches(name, key) {
  return key.endsWith("/") ? name.startsWith(key) : name === key;
}

function linesOf(feeds, keys) {
  return feeds.flatMap((feed, index) =>
    keys
      .flatMap((key) => [...feed.series].filter(([name, values]) => matches(name, key) && (name === key || values.some(Boolean))))
      .map(([name, values], place) => ({
        label: feeds.length > 1 ? `${shortName(name, keys)} · ${feed.run}` : shortName(name, keys),
        steps: feed.steps,
        values,
        dash: index > 0,
        colour: feeds.length > 1 ? index + place * feeds.length : place,
      })),
  );
}

function shortName(name, keys) {
  const family = keys.find((key) => key.endsWith("/") && name.startsWith(key));
  return family ? name.slice(family.length) : name.replace(/^(rollout|actor|training|timing_s|rounds)\//, "");
}

function heading(run) {
  const last = { run: run.name, step_min: run.last_step, step_max: run.last_step };
  const isLive = Date.now() / 1000 - run.modified_at < LIVE_S;
  return [
    h("h1", {}, run.title),
    h(
      "div",
      { class: "row stats" },
      isLive ? h("span", { class: "chip good" }, h("span", { class: "live-dot" }, "●"), " live") : null,
      h("span", {}, `changed ${ago(run.modified_at)}`),
      isTraining(run) ? h("span", {}, `step ${run.last_step ?? "–"}`) : null,
      run.last_score_mean === null ? null : h("span", {}, `last step: score ${score(run.last_score_mean)}, success ${percent(run.last_success_mean)}`),
      h("span", {}, `${isTraining(run) ? "whole run: " : ""}score ${score(run.score_mean)}, success ${percent(run.success_mean)}`),
      h("a", { href: link("trajectories", "", { run: run.name, sort: "step", descending: true }) },
        `${run.num_trajectories} trajectories`),
      h("a", { href: link("items", "", { run: run.name, sort: "success_mean" }) }, "by item"),
      h("a", { href: link("trajectories", "", { run: run.name, goal: "contradicted" }) }, "panel and result differ"),
      h("a", { href: link("trajectories", "", { ...last, grouped: true }) }, isTraining(run) ? "last step, by group" : "by group"),
      h("a", { href: link("trajectories", "", { ...last, success: false, sort: "score" }) }, isTraining(run) ? "failures of the last step" : "failures"),
    ),
    h(
      "div",
      { class: "row stats" },
      h("span", { class: "muted" }, "Ended by"),
      Object.entries(run.stop_reasons).map(([reason, count]) =>
        h("a", { href: link("trajectories", "", { run: run.name, stop: reason, sort: "step", descending: true }) },
          `${reason || "unknown"} ${count}`),
      ),
    ),
  ];
}

function select(label, options, chosen, onChoose) {
  const element = h(
    "select",
    { on: { change: (event) => event.target.value && onChoose(event.target.value) } },
    h("option", { value: "" }, "…"),
    options.filter(([value]) => !chosen.includes(value)).map(([value, text]) => h("option", { value }, text)),
  );
  return options.length ? h("label", {}, `${label} `, element) : null;
}

function toggled(list, value) {
  return list.includes(value) ? list.filter((each) => each !== value) : [...list, value];
}
