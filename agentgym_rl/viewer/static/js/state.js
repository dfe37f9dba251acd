// What every list says of the library: how far files have been read, and what could not be.

import { h } from "./dom.js";
import { number, percent } from "./format.js";

export function readingState({ is_complete, done_bytes, total_bytes, problems, unchecked = 0 }) {
  return [
    is_complete ? null : h("p", { class: "notice" }, `Reading the files: ${percent(done_bytes / total_bytes)}`),
    unchecked ? h("p", { class: "notice" }, `Making panels: ${number(unchecked)} trajectories are still to be looked at`) : null,
    problems.length
      ? h(
          "details",
          { class: "notice" },
          h("summary", {}, `${problems.length} file${problems.length > 1 ? "s" : ""} with unreadable rows`),
          h("ul", {}, problems.map((problem) => h("li", {}, problem))),
        )
      : null,
  ];
}
