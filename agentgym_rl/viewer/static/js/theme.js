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

/** The value that a colour of the style sheet, such as `--accent`, has now, for what is drawn on a canvas. */
export function colour(name) {
  // The variable itself holds the colours of both themes; one that is used is resolved.
  const root = document.documentElement;
  root.style.setProperty("outline-color", `var(${name})`); // without a style of line, none is drawn
  return getComputedStyle(root).outlineColor;
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
