// Building the page. Text reaches the document only as text nodes: there is no way here to make HTML of a string.

const SVG = "http://www.w3.org/2000/svg";
const SAFE_ATTRIBUTES = new Set([
  "id", "class", "for", "type", "name", "value", "placeholder", "title", "role", "tabindex", "min", "max", "step",
  "colspan", "rowspan", "scope", "open", "disabled", "checked", "selected", "autocomplete", "spellcheck", "lang",
  "hidden", "list", "label", "alt", "width", "height", "inputmode", "rows", "multiple", "download", "readonly",
  // SVG
  "viewBox", "d", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "rx", "ry", "points", "transform", "fill",
  "stroke", "stroke-width", "text-anchor", "dominant-baseline", "preserveAspectRatio",
]);
const ALLOWED_LINK = /^(#|\/api\/|\/static\/|blob:)/;
const ALLOWED_IMAGE = /^(data:image\/(png|jpeg);base64,[A-Za-z0-9+/=]+$|blob:|\/static\/)/;

/**
 * An element. Options: attributes by name (`data-*` and `aria-*` too), `on: {event: handler}`, `style: {property: value}`.
 * Children: nodes, strings and numbers (as text), arrays of them; null, undefined and false are left out.
 * Throws for an attribute that is not known to be harmless.
 */
export function h(tag, options = {}, ...children) {
  return build(document.createElement(tag), options, children);
}

/** The same for SVG. */
export function svg(tag, options = {}, ...children) {
  return build(document.createElementNS(SVG, tag), options, children);
}

/** Put `children` in the place of all that `element` holds. */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** Add `children` at the end of `element`. */
export function add(element, ...children) {
  element.append(...nodes(children));
  return element;
}

function build(element, options, children) {
  for (const [name, value] of Object.entries(options)) setOption(element, name, value);
  element.append(...nodes(children));
  return element;
}

function setOption(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name === "on") {
    for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
  } else if (name === "style") {
    for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
  } else if (name === "href") {
    if (!ALLOWED_LINK.test(value)) throw new Error(`href=${value}: only addresses within the viewer`);
    element.setAttribute("href", value);
  } else if (name === "src") {
    if (element.localName !== "img" || !ALLOWED_IMAGE.test(value)) throw new Error("src: only images given as data");
    element.setAttribute("src", value);
  } else if (SAFE_ATTRIBUTES.has(name) || /^(data|aria)-[a-z-]+$/.test(name)) {
    element.setAttribute(name, value === true ? "" : String(value));
  } else {
    throw new Error(`attribute ${name} is not allowed`);
  }
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

/** Say something to a screen reader. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
