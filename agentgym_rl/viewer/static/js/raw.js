// The messages as they are, with their token ids, and the whole row.

import { rawRow } from "./api.js";
import { fill, h } from "./dom.js";

export function rawView(record, id) {
  const ids = record.tokens?.input_ids ?? [];
  return h(
    "div",
    { class: "raw" },
    record.messages.map((message, index) => {
      const [start, end] = message.tokens ?? [0, 0];
      const text = message.pieces.map(([, piece]) => piece).join("");
      return h(
        "section",
        { class: "card" },
        h("h2", {}, `Message ${index}: ${message.role}`),
        h("p", { class: "muted" }, `${text.length} characters, tokens ${start} to ${end}, loss ${message.loss}`),
        h("div", { class: "text long", tabindex: 0, role: "group", "aria-label": `Text of message ${index}` }, text),
        end > start ? lazyDetails("Token ids", () => ids.slice(start, end).join(" ")) : null,
      );
    }),
    h("section", { class: "card" }, h("h2", {}, "Row"), lazyDetails("JSON", () => rawRow(id))),
  );
}

/** Filled when it is opened for the first time. */
function lazyDetails(title, load) {
  const body = h("div", { class: "text long", tabindex: 0, role: "group", "aria-label": title }, "…");
  let isFilled = false;
  const open = async () => {
    if (isFilled) return;
    isFilled = true;
    try {
      fill(body, await load());
    } catch (error) {
      fill(body, error.message);
    }
  };
  return h("details", { on: { toggle: open } }, h("summary", {}, title), body);
}
