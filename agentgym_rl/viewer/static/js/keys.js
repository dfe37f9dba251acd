// Keys: a page binds single keys while it is shown; `?` lists them. Keys typed into a field stay with the field.

const bindings = [];

/**
 * Bind `key` (as `KeyboardEvent.key`, or several in a list) to `action`, explained by `text`, until the returned
 * function is called. The latest binding of a key counts.
 */
export function bind(key, text, action) {
  const binding = { keys: [key].flat(), text, action };
  bindings.push(binding);
  return () => bindings.splice(bindings.indexOf(binding), 1);
}

/** Bind many: `[[key, text, action], ...]`; returns what ends all of them. */
export function bindAll(list) {
  const ends = list.map(([key, text, action]) => bind(key, text, action));
  return () => ends.forEach((end) => end());
}

/** What is bound now: `[keys, text]`. */
export function listBindings() {
  return bindings.map(({ keys, text }) => [keys, text]);
}

const FIELDS = "input, textarea, select, [contenteditable]";
// Keys that move or press what has the focus; a button keeps Enter and blank, and so on.
const OWN_KEYS = new Map([
  ["Enter", "a, button, summary, [role=button]"],
  [" ", "button, summary, [role=button]"],
]);

export function startKeys() {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const target = event.target;
    if (target.closest?.(FIELDS)) {
      if (event.key === "Escape") target.blur();
      return;
    }
    const owner = OWN_KEYS.get(event.key);
    if (owner && target.closest?.(owner)) return;
    if (document.querySelector("dialog[open]") && event.key !== "Escape") return;
    const binding = bindings.findLast(({ keys }) => keys.includes(event.key));
    if (!binding) return;
    event.preventDefault();
    binding.action(event);
  });
}
