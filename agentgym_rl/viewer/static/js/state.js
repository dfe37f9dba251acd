// What every list says of the library: how far files have been read, and what could not be.

import { h } from "./dom.js";
import { percent } from "./format.js";

export function readingState({ is_complete, done_bytes, total_bytes, problems }) {
  return [
    is_complete ? null : h("p", { class: "notice" }, `Reading the files: ${percent(done_bytes / total_bytes)}`),
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
