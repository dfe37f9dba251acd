// The front end's start: navigation, theme, keys, and the router over the registered pages.

import { bindAll, startKeys } from "./keys.js";
import { fill, h } from "./dom.js";
import { link, navigation, go, startRouter } from "./router.js";
import { helpDialog } from "./help.js";
import { themeButton } from "./theme.js";
import "../pages/index.js";
import "../panels/environment.js";

const help = helpDialog();

function showBar(active) {
  const items = navigation().map((page) =>
    h("a", { href: link(page.name), "aria-current": page.name === active ? "page" : null }, page.nav),
  );
  fill(
    document.getElementById("bar"),
    h("a", { class: "brand", href: link("runs") }, "AgentGym-RL"),
    h("nav", { "aria-label": "Pages" }, items),
    h("span", { class: "spacer" }),
    h("button", { type: "button", title: "Keys (?)", on: { click: help.toggle } }, "Keys"),
    themeButton(),
  );
}

function showError(error, main) {
  fill(
    main,
    h("h1", {}, "This could not be shown"),
    h("p", { role: "alert", class: "problem" }, error.message),
    h("p", {}, h("a", { href: link("runs") }, "All runs")),
  );
}

document.body.append(help.element);
startKeys();
bindAll([
  ["?", "show or hide these keys", help.toggle],
  ["g", "go to the runs", () => go(link("runs"))],
  ["t", "go to the trajectories", () => go(link("trajectories"))],
]);
startRouter(document.getElementById("main"), { onShow: showBar, onError: showError });
