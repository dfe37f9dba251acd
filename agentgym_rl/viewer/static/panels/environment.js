// The panel that the trajectory's environment brings.

import { get } from "../js/api.js";
import { fill, h } from "../js/dom.js";
import { panelView } from "../js/frames.js";
import { addPanel } from "./index.js";

addPanel(async ({ record, main, signal }) => {
  let panel;
  try {
    panel = await get(`trajectories/${encodeURIComponent(record.summary.id)}/panel`, {}, { signal });
  } catch (error) {
    if (signal.aborted) return null;
    fill(main, h("p", { class: "problem", role: "alert" }, `The panel could not be made: ${error.message}`));
    return { title: "Environment", show: () => {} };
  }
  if (panel === null) return null;
  const view = panelView(panel);
  fill(main, view.element);
  return { title: "Environment", show: view.show };
});
