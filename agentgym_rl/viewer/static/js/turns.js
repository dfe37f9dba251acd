// The turns of one episode as a list of which one is marked; for exported files and for play.

import { h } from "./dom.js";

const ROLES = new Set(["user", "assistant", "system", "tool"]);
const KINDS = new Set(["thought", "action", "plan", "reflection", "observation", "instruction", "acknowledgement"]);

/** `{element, select, selected}`: messages as `records.py` tells them, with each turn's reward. */
export function turnsView({ messages, turns }) {
  const first = messages.findIndex((message) => message.turn !== null);
  const opening = first < 0 ? messages : messages.slice(0, first);
  const places = turns.map((turn) => turn.message);
  const sections = turns.map((turn, index) => drawTurn(turn, index, messages, places[index + 1] ?? messages.length));
  let marked = 0;
  const select = (number) => {
    sections[marked - 1]?.removeAttribute("aria-current");
    marked = Math.max(0, Math.min(number, sections.length));
    sections[marked - 1]?.setAttribute("aria-current", "true");
    return marked;
  };
  const element = h(
    "div",
    { class: "turns" },
    h("details", { open: !turns.length }, h("summary", {}, "Before the first turn"), opening.map((message) => drawMessage(message))),
    sections,
  );
  return { element, sections, select, selected: () => marked };
}

/** A trajectory in figures, from its summary. */
export function outcomeFacts({ score, success, stop_reason, turns, tokens, policy_version, error }) {
  const facts = [
    ["Score", score ?? "none"],
    ["Success", success === null ? "unknown" : success ? "yes" : "no"],
    ["Stopped by", stop_reason || "unknown"],
    ["Turns", turns],
    ["Tokens", tokens || "unknown"],
    ["Policy", policy_version],
  ];
  return [
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    error ? h("p", { class: "problem" }, error) : null,
  ];
}

function drawTurn(turn, index, messages, end) {
  const own = turn.message === null ? [] : messages.slice(turn.message, end);
  // The last answer of the environment is told by the turn alone.
  const unsaid = own.length < 2 && turn.observation ? [{ role: "user", pieces: [["observation", turn.observation]] }] : [];
  return h(
    "section",
    { class: "turn", id: `turn-${index + 1}`, "aria-label": `Turn ${index + 1}` },
    h("h3", {}, `Turn ${index + 1}`, turn.reward ? h("span", { class: "badge" }, `reward ${turn.reward}`) : null),
    [...own, ...unsaid].map((message) => drawMessage(message, message.role !== "assistant")),
  );
}

/** `isAnswer`: it follows a turn, so that it is the environment's also where its parts are not told. */
function drawMessage({ role, pieces, aside }, isAnswer = false) {
  const [speaker] = role.split(" ");
  const isSeen = isAnswer || pieces.some(([kind]) => kind === "observation");
  return h("div", { class: ROLES.has(speaker) ? `message ${speaker}` : "message" }, h("h4", {}, aside ?? (isSeen ? "observation" : role)), h("p", { class: "words" }, pieces.map(drawPiece)));
}

function drawPiece([kind, text]) {
  return KINDS.has(kind) ? h("span", { class: kind }, text) : text;
}
