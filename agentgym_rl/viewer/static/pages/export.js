// Take trajectories away to train on: conversations, or preference pairs.

import { get, queryString } from "../js/api.js";
import { fill, h } from "../js/dom.js";
import { addPage, link } from "../js/router.js";

addPage("export", { title: "Export", show });

async function show({ main, parameters, signal }) {
  const filters = {};
  for (const name of new Set(parameters.keys())) {
    if (!["sort", "descending", "grouped", "offset", "limit"].includes(name)) filters[name] = parameters.getAll(name);
  }
  const { total } = await get("trajectories", { ...filters, limit: 1 }, { signal });
  const conversations = h("a", { download: "" }, "Save conversations (JSONL)");
  const pairs = h("a", { download: "" }, "Save preference pairs (JSONL)");
  const onlySuccess = h("input", { type: "checkbox", id: "export-success" });
  const gap = h("input", { type: "number", id: "export-gap", min: 0, step: 0.1, value: 0 });
  const perItem = h("input", { type: "number", id: "export-per-item", min: 1, value: 1 });
  const threshold = h("input", { type: "number", id: "export-threshold", step: 0.1, placeholder: "success" });
  const update = () => {
    const chosen = onlySuccess.checked ? { ...filters, success: "true" } : filters;
    conversations.setAttribute("href", `/api/export/conversations${queryString(chosen)}`);
    const rules = { min_gap: gap.value, per_item: perItem.value, threshold: threshold.value };
    pairs.setAttribute("href", `/api/export/pairs${queryString({ ...filters, ...rules })}`);
  };
  for (const field of [onlySuccess, gap, perItem, threshold]) field.addEventListener("input", update);
  update();
  fill(
    main,
    h("h1", {}, "Export"),
    h("p", {}, `${total} trajectories are chosen by `, h("a", { href: link("trajectories", "", filters) }, "the filters of the list"), ". Faults are left out of the files."),
    h(
      "section",
      { class: "card away" },
      h("h2", {}, "Conversations for supervised training"),
      h("p", {}, h("label", { for: "export-success" }, onlySuccess, " successes only")),
      h("p", {}, conversations),
    ),
    h(
      "section",
      { class: "card away" },
      h("h2", {}, "Pairs for preference training"),
      h(
        "p",
        { class: "row" },
        h("label", { for: "export-gap" }, "Scores differ by at least "),
        gap,
        h("label", { for: "export-threshold" }, "The better one scores at least "),
        threshold,
        h("label", { for: "export-per-item" }, "Pairs of an item "),
        perItem,
      ),
      h("p", {}, pairs),
    ),
  );
}
