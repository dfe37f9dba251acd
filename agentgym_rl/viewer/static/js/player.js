// Play, pause and step through turns.

import { fill, h } from "./dom.js";

const TURN_MS = 1200;
const SPEEDS = [0.5, 1, 2, 4];

/** `onTurn(turn)` is called for each turn that playing comes to; `mark(turn)` tells it where it is. */
export function player({ last, onTurn }) {
  let present = 0;
  let timer = 0;
  const position = h("output", { class: "muted position" });
  const button = h("button", { type: "button", on: { click: toggle } });
  const speed = h("select", { "aria-label": "Speed" }, SPEEDS.map((each) => h("option", { value: each, selected: each === 1 }, `${each}×`)));
  const element = h(
    "div",
    { class: "row player", role: "group", "aria-label": "Player" },
    h("button", { type: "button", "aria-label": "Turn before", on: { click: () => onTurn(present - 1) } }, "◀"),
    button,
    h("button", { type: "button", "aria-label": "Next turn", on: { click: () => onTurn(present + 1) } }, "▶"),
    speed,
    position,
  );

  function toggle() {
    if (timer) stop();
    else start();
  }
  function start() {
    if (present >= last) onTurn(0);
    schedule();
    label();
  }
  function schedule() {
    timer = setTimeout(() => {
      onTurn(present + 1);
      if (present < last) schedule();
      else stop();
    }, TURN_MS / Number(speed.value));
  }
  function stop() {
    clearTimeout(timer);
    timer = 0;
    label();
  }
  function label() {
    button.textContent = timer ? "Pause" : "Play";
  }
  label();
  return {
    element,
    toggle,
    stop,
    mark(turn) {
      present = turn;
      fill(position, turn ? `turn ${turn} of ${last}` : `before turn 1 of ${last}`);
    },
  };
}
