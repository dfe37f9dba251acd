// Which page is shown: addresses are `#/<page>/<argument>?<parameters>`, so that every state of a page is a link.

const pages = new Map();
let current = { leave: () => {} };
let container = null;

/**
 * Make a page known. `show({main, argument, parameters, setParameters, signal})` fills `main` and may return a function
 * that is called when the page is left; `signal` is aborted then. A page that can follow a change of its own parameters
 * without being built anew calls `setParameters(changes)`, which rewrites the address only.
 */
export function addPage(name, { title, show, nav = null }) {
  pages.set(name, { name, title, show, nav });
}

/** Pages with an entry in the navigation bar, in the order in which they were added. */
export function navigation() {
  return [...pages.values()].filter((page) => page.nav !== null);
}

/** The address of a page; parameters that are empty are left out. */
export function link(page, argument = "", parameters = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== "" && each !== null && each !== undefined) search.append(name, each);
    }
  }
  const text = search.toString();
  return `#/${page}${argument ? `/${encodeURIComponent(argument)}` : ""}${text ? `?${text}` : ""}`;
}

export function go(address) {
  location.hash = address;
}

/** Page name, argument and parameters of the present address. */
export function here() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [name, argument = ""] = path.split("/");
  return { name: name || "runs", argument: decode(argument), parameters: new URLSearchParams(search) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Change parameters of the present address without showing the page anew. */
function setParameters(changes) {
  const { name, argument, parameters } = here();
  for (const [key, value] of Object.entries(changes)) {
    parameters.delete(key);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== "" && each !== null && each !== undefined) parameters.append(key, each);
    }
  }
  const search = parameters.toString();
  const path = `#/${name}${argument ? `/${encodeURIComponent(argument)}` : ""}${search ? `?${search}` : ""}`;
  history.replaceState(null, "", path);
}

/** Show the page of the address, now and whenever the address changes. */
export function startRouter(main, { onShow, onError }) {
  container = main;
  const show = async () => {
    const { name, argument, parameters } = here();
    const page = pages.get(name);
    current.leave();
    const controller = new AbortController();
    const leavers = [() => controller.abort()];
    current = { leave: () => leavers.forEach((leave) => leave()) };
    container.replaceChildren();
    scrollTo(0, 0);
    document.title = `${page ? page.title : "Not found"} · AgentGym-RL`;
    onShow(name);
    try {
      if (!page) throw new Error(`There is no page “${name}”.`);
      const leave = await page.show({ main: container, argument, parameters, setParameters, signal: controller.signal });
      if (typeof leave === "function") {
        if (controller.signal.aborted) leave();
        else leavers.push(leave);
      }
    } catch (error) {
      if (!controller.signal.aborted) onError(error, container);
    }
  };
  addEventListener("hashchange", show);
  return show();
}
