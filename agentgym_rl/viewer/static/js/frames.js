// A panel that follows the turns: frame k shows the state after k turns.

import { fill, h } from "./dom.js";
import { drawBlocks } from "./blocks.js";

/**
 * `{element, show}` of a panel as the server tells it; `show(turn)` draws the frame of a turn, the last one at most.
 * `brief` leaves out what is the same at every turn.
 */
export function panelView(panel, { brief = false } = {}) {
  const frame = h("div", { class: "frame-blocks" });
  const element = h(
    "div",
    { class: "panel" },
    frame,
    !brief && panel.always.length ? h("div", { class: "frame-blocks" }, drawBlocks(panel.always)) : null,
    panel.note ? h("p", { class: "muted note" }, panel.note) : null,
  );
  let shown = -1;
  const show = (turn) => {
    const number = Math.max(0, Math.min(turn, panel.frames.length - 1));
    if (number === shown || !panel.frames.length) return;
    shown = number;
    fill(frame, drawBlocks(panel.frames[number]));
  };
  return { element, show };
}
