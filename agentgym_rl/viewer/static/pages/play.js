// Step an environment by hand, or let a served model act; the page talks to the viewer alone.

import { get, post } from "../js/api.js";
import { announce, fill, h } from "../js/dom.js";
import { panelView } from "../js/frames.js";
import { addPage } from "../js/router.js";
import { turnsView } from "../js/turns.js";

// That a model plays on before it is asked for again: each may cost.
const MOST_TURNS = 50;

addPage("play", { title: "Play", show, nav: "Play" });

async function show({ main, signal }) {
  const settings = await get("play", {}, { signal });
  if (!settings.servers.length) {
    fill(
      main,
      h("h1", {}, "Play"),
      h("p", {}, "No environment's server is configured. Start one, and name it to the viewer:"),
      h("pre", {}, "agentgym-rl serve textcraft &\nagentgym-rl view FOLDER --env textcraft=http://127.0.0.1:36001"),
      h("p", {}, "--model NAME=URL adds a served model that may act, --save-to FOLDER a place for what was played."),
    );
    return undefined;
  }
  return new Play(main, settings).leave;
}

class Play {
  #settings;
  #game = null;
  #busy = false;
  #auto = false;
  #left = false;

  constructor(main, settings) {
    this.#settings = settings;
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.area = h("div", {});
    fill(main, h("h1", {}, "Play"), this.#beginForm(), this.problem, this.area);
    addEventListener("pagehide", this.leave);
  }

  leave = () => {
    this.#left = true;
    this.#auto = false;
    removeEventListener("pagehide", this.leave);
    this.#close();
  };

  #close() {
    // keepalive: the call outlives a page that is being closed.
    if (this.#game) fetch(`/api/play/games/${this.#game.id}/close`, { method: "POST", keepalive: true }).catch(() => {});
    this.#game = null;
  }

  #beginForm() {
    const { servers } = this.#settings;
    const server = h(
      "select",
      { id: "play-server" },
      servers.map((each, index) => h("option", { value: index }, `${each.title} at ${each.url}`)),
    );
    const item = h("input", { id: "play-item", type: "number", min: 0, value: 0, inputmode: "numeric" });
    const form = h(
      "form",
      { class: "row" },
      h("label", { for: "play-server" }, "Server"),
      server,
      h("label", { for: "play-item" }, "Item"),
      item,
      h("button", { type: "submit" }, "Begin"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#close();
      fill(this.area);
      this.#call(() => post("play/games", { server: Number(server.value), item: Number(item.value) }));
    });
    return form;
  }

  /** Run one call at a time, and show the game that it answers with. */
  async #call(ask) {
    if (this.#busy) return false;
    this.#busy = true;
    this.#setBusy(true);
    this.problem.hidden = true;
    let answered = false;
    try {
      this.#take(await ask());
      answered = true;
    } catch (error) {
      if (!this.#left) {
        this.problem.textContent = error.message;
        this.problem.hidden = false;
      }
    } finally {
      this.#busy = false;
      this.#setBusy(false);
    }
    return answered;
  }

  #take(answer) {
    if (this.#left) {
      // The page was left while the game was being opened.
      this.#game = answer.turns ? answer : this.#game;
      this.#close();
    } else if (answer.turns) {
      this.#game = answer;
      this.#draw();
    } else if (answer.proposal !== undefined) {
      this.field.value = answer.proposal;
      this.field.focus();
    } else {
      announce(`Saved as ${answer.path}`);
      fill(this.saved, `Saved as ${answer.path}`);
    }
  }

  #setBusy(busy) {
    this.area.setAttribute("aria-busy", String(busy));
    for (const button of this.area.querySelectorAll("button:not(.stop)")) button.disabled = busy;
  }

  #path(call) {
    return `play/games/${this.#game.id}/${call}`;
  }

  #draw() {
    const game = this.#game;
    const list = turnsView(asRecord(game));
    const panel = game.panel && panelView(game.panel);
    this.saved = h("p", { class: "muted", role: "status" });
    fill(
      this.area,
      h("p", { class: "row" }, h("strong", {}, game.item_id), h("span", { class: "chip" }, `score ${game.score}`), game.done ? h("span", { class: game.success ? "chip good" : "chip bad" }, game.success ? "done: success" : "done") : null),
      h("div", { class: panel ? "pair" : "" }, h("div", {}, list.element, this.#controls(game)), panel ? h("aside", { class: "sticky", tabindex: 0, "aria-label": "Environment" }, panel.element) : null),
    );
    panel?.show(game.turns.length);
    announce(game.turns.length ? `Turn ${game.turns.length}: ${game.turns.at(-1).observation}` : "The item has begun");
    if (!game.done) this.field.focus({ preventScroll: true });
    (list.sections.at(-1) ?? list.element).scrollIntoView({ block: "nearest" });
  }

  #controls(game) {
    this.field = h("textarea", { id: "play-text", rows: 3, spellcheck: "false", placeholder: "an action, or: Thought: … Action: …" });
    const act = () => {
      const text = this.field.value.trim();
      if (text) this.#call(() => post(this.#path("act"), { text }));
    };
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        act();
      }
    });
    return h(
      "div",
      { class: "card controls" },
      game.done
        ? null
        : [
            h("label", { for: "play-text" }, "Your turn (Enter plays it, Shift+Enter breaks the line)"),
            this.field,
            h("p", { class: "row" }, h("button", { type: "button", on: { click: act } }, "Act"), this.#actionList(game)),
            this.#settings.models.length ? this.#modelControls() : null,
          ],
      this.#settings.can_save && game.turns.length
        ? h("p", { class: "row" }, h("button", { type: "button", on: { click: () => this.#call(() => post(this.#path("save"), {})) } }, "Save the trajectory"))
        : null,
      this.saved,
    );
  }

  #actionList(game) {
    if (!game.actions.length) return null;
    const more = game.num_actions - game.actions.length;
    const select = h(
      "select",
      { "aria-label": "Available actions" },
      h("option", { value: "" }, `${game.num_actions} available actions`),
      game.actions.map((action) => h("option", { value: action }, action)),
      more ? h("option", { disabled: true }, `and ${more} more`) : null,
    );
    select.addEventListener("change", () => {
      this.field.value = select.value;
      this.field.focus();
    });
    return select;
  }

  #modelControls() {
    const model = h("select", { "aria-label": "Model" }, this.#settings.models.map(({ name }) => h("option", { value: name, selected: name === this.model }, name)));
    const temperature = h("input", { type: "number", "aria-label": "Temperature", min: 0, max: 2, step: 0.1, value: this.temperature ?? 0 });
    const ask = (play) => {
      [this.model, this.temperature] = [model.value, temperature.value];
      return this.#call(() => post(this.#path("ask"), { model: model.value, temperature: Number(temperature.value), play }));
    };
    const toEnd = async () => {
      this.#auto = true;
      for (let turn = 0; turn < MOST_TURNS && this.#auto && this.#game && !this.#game.done; turn += 1) {
        if (!(await ask(true))) break;
      }
      this.#auto = false;
    };
    return h(
      "p",
      { class: "row" },
      model,
      h("label", {}, "Temperature ", temperature),
      h("button", { type: "button", on: { click: () => ask(false) } }, "Propose"),
      h("button", { type: "button", on: { click: () => ask(true) } }, "Model plays a turn"),
      h("button", { type: "button", on: { click: toEnd } }, "Model plays on"),
      h("button", { type: "button", class: "stop", on: { click: () => (this.#auto = false) } }, "Stop"),
    );
  }
}

/** The game in the form of a trajectory's record. */
function asRecord({ messages, turns, players }) {
  const spoken = messages.flatMap((message, index) => (message.role === "assistant" ? [index] : []));
  const places = spoken.slice(spoken.length - turns.length);
  return {
    messages: messages.map(({ role, content }, index) => {
      const turn = places.indexOf(index);
      return { role: turn >= 0 ? `assistant (${players[turn]})` : role, turn: turn >= 0 ? turn : null, aside: null, pieces: [["", content]] };
    }),
    turns: turns.map((turn, index) => ({ ...turn, message: places[index] })),
  };
}
