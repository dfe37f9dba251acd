// The list of keys.

import { fill, h } from "./dom.js";
import { listBindings } from "./keys.js";

const NAMES = { " ": "Space", ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };

export function helpDialog() {
  const list = h("dl", { class: "keys" });
  const close = h("button", { type: "button", on: { click: () => element.close() } }, "Close");
  const element = h("dialog", { "aria-labelledby": "keys-title" }, h("h2", { id: "keys-title" }, "Keys"), list, close);
  const toggle = () => {
    if (element.open) {
      element.close();
      return;
    }
    const rows = listBindings().map(([keys, text]) => [
      h("dt", {}, keys.map((key) => h("kbd", {}, NAMES[key] ?? key))),
      h("dd", {}, text),
    ]);
    fill(list, rows);
    element.showModal();
  };
  return { element, toggle };
}
