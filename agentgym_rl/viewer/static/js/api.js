// Calls to the server that this page came from.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** JSON of `GET /api/<path>`; lists among `parameters` repeat the name, empty values are left out. */
export async function get(path, parameters = {}, { signal } = {}) {
  return answer(await ask(`/api/${path}${queryString(parameters)}`, { signal }));
}

/** A trajectory's row as it stands in its file. */
export async function rawRow(id, { signal } = {}) {
  const response = await ask(`/api/trajectories/${encodeURIComponent(id)}/raw`, { signal });
  if (response.ok) return response.text();
  throw new ApiError(response.status, await reason(response));
}

/** JSON of `POST /api/<path>` with a JSON body. */
export async function post(path, body, { signal } = {}) {
  const headers = { "content-type": "application/json" };
  return answer(await ask(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

export function queryString(parameters) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== "" && each !== null && each !== undefined) search.append(name, each);
    }
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

/** As `fetch`, whose own words for a server that is gone say little. */
async function ask(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The viewer does not answer. Is “agentgym-rl view” still running?", { cause: error });
  }
}

async function answer(response) {
  if (response.ok) return response.json();
  throw new ApiError(response.status, await reason(response));
}

async function reason(response) {
  const text = await response.text();
  try {
    const { detail } = JSON.parse(text);
    if (Array.isArray(detail)) return detail.map((each) => `${each.loc.slice(1).join(".")}: ${each.msg}`).join("; ");
    return String(detail);
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

/**
 * Call `load` every `seconds` while the page is visible, until the returned function is called. `load` may be async and
 * is never called twice at a time; what it throws goes to `failed`, and the calls go on. It may return true for "at once
 * again".
 */
export function poll(load, seconds, failed = () => {}) {
  let stopped = false;
  let timer = 0;
  const turn = async () => {
    let again = false;
    if (!document.hidden) {
      try {
        again = (await load()) === true;
      } catch (error) {
        if (!stopped) failed(error);
      }
    }
    if (!stopped) timer = setTimeout(turn, again ? 30 : seconds * 1000);
  };
  timer = setTimeout(turn, seconds * 1000);
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}
