// Light or dark: the system's choice, unless the user has made one here.

import { h } from "./dom.js";

const KEY = "agentgym-viewer-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const listeners = new Set();

function chosen() {
  const stored = localStorage.getItem(KEY);
  return stored in NEXT ? stored : "system";
}

function apply() {
  const theme = chosen();
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  listeners.forEach((listener) => listener());
}

/** Call `listener` after each change of colours, until the returned function is called. */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The value of a colour of the style sheet, such as `--accent`, for what is drawn on a canvas. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function themeButton() {
  const button = h("button", { type: "button" });
  const label = () => {
    button.textContent = `Theme: ${chosen()}`;
  };
  button.addEventListener("click", () => {
    localStorage.setItem(KEY, NEXT[chosen()]);
    apply();
    label();
  });
  label();
  return button;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => listeners.forEach((listener) => listener()));
apply();
