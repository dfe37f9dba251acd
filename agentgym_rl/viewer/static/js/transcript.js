// The turns of a trajectory: the timeline, and cards with thought, action and observation apart.

import { h } from "./dom.js";
import { number, seconds } from "./format.js";

const TITLES = {
  instruction: "Instruction",
  acknowledgement: "Acknowledgement",
  observation: "Observation",
  thought: "Thought",
  action: "Action",
  plan: "Plan",
  reflection: "Reflection",
};
const FINISHES = { length: "cut at max_tokens" };

/** A list of all turns; `choose(turn)` is called for the one that is pressed, `mark(turn)` shows the present one. */
export function timeline(record, choose) {
  const longest = Math.max(1, ...record.turns.map((turn) => turn.num_tokens ?? 0));
  const entry = (turn, content) => h("li", {}, h("button", { type: "button", on: { click: () => choose(turn) } }, content));
  const entries = [
    entry(0, h("span", { class: "name" }, "Start")),
    ...record.turns.map((turn, index) =>
      entry(index + 1, [
        h("span", { class: "name" }, `${index + 1}`),
        h("span", { class: "what" }, actionOf(record, turn) || "no action"),
        reward(turn),
        h("span", { class: "bar-of", "aria-hidden": "true", style: { width: `${(100 * (turn.num_tokens ?? 0)) / longest}%` } }),
      ]),
    ),
  ];
  const element = h("nav", { class: "card timeline", "aria-label": "Turns" }, h("ol", {}, entries));
  return {
    element,
    mark(present) {
      entries.forEach((each, index) => {
        const button = each.firstChild;
        if (index === present) {
          button.setAttribute("aria-current", "step");
          const [top, bottom] = [each.offsetTop, each.offsetTop + each.offsetHeight];
          if (top < element.scrollTop || bottom > element.scrollTop + element.clientHeight) element.scrollTop = top - 60;
        } else {
          button.removeAttribute("aria-current");
        }
      });
    },
  };
}

function actionOf(record, turn) {
  if (turn.message === null) return turn.text;
  const { pieces } = record.messages[turn.message];
  return (pieces.find(([kind]) => kind === "action") ?? pieces[0])?.[1];
}

function reward(turn) {
  if (!turn.reward) return null;
  return h("span", { class: `reward ${turn.reward > 0 ? "good" : "bad"}`, title: `reward ${turn.reward}` }, `${turn.reward > 0 ? "+" : ""}${number(turn.reward)}`);
}

/** All that was said; `mark(turn, scrolls)` shows the present turn. `addressOf(turn)` gives the link to a turn. */
export function transcript(record, addressOf) {
  const cards = [];
  const opening = h("section", { class: "card moment", "aria-label": "Start" }, h("header", {}, h("h2", {}, "Start")));
  let present = { card: opening, blocks: opening, turn: null };
  const all = [opening];
  record.messages.forEach((message, index) => {
    if (message.turn !== null) {
      closeTurn(present);
      const turn = record.turns[message.turn];
      const card = turnCard(message.turn, turn, addressOf);
      cards[message.turn] = card;
      all.push(card);
      present = { card, turn, hasAnswer: false };
    } else if (message.aside) {
      closeTurn(present);
      const aside = h("section", { class: "card moment aside", "aria-label": TITLES[message.aside] ?? message.aside });
      all.push(aside);
      present = { card: aside, turn: null };
    } else if (message.role === "user" && present.turn) {
      present.hasAnswer = true;
    }
    const isEnvironment = message.role !== "assistant";
    present.card.append(...blocks(message, isEnvironment && index > 0 ? "observation" : "", index === 0));
  });
  closeTurn(present);
  record.turns.forEach((turn, index) => {
    if (cards[index]) return;
    cards[index] = turnCard(index, turn, addressOf);
    cards[index].append(...block("", turn.text ?? ""), ...block("observation", turn.observation ?? ""));
    all.push(cards[index]);
  });
  const frames = [opening, ...cards];
  return {
    element: h("div", { class: "transcript" }, all),
    mark(turn, scrolls) {
      frames.forEach((frame, index) => frame.classList.toggle("present", index === turn));
      if (scrolls && frames[turn].isConnected) frames[turn].scrollIntoView({ block: "nearest" });
    },
  };
}

/** The last observation of an episode stands in no message, since no turn follows it. */
function closeTurn({ card, turn, hasAnswer }) {
  if (!turn || hasAnswer) return;
  if (turn.observation === null) card.append(h("p", { class: "problem" }, "This turn was never executed."));
  else if (turn.observation !== undefined) card.append(...block("observation", turn.observation));
}

function turnCard(index, turn, addressOf) {
  const facts = [
    reward(turn) ?? h("span", { class: "muted" }, "reward 0"),
    turn.num_tokens === undefined ? null : fact("tokens", number(turn.num_tokens)),
    turn.generation_s === undefined ? null : fact("model", seconds(turn.generation_s)),
    turn.env_s === undefined ? null : fact("environment", seconds(turn.env_s)),
    FINISHES[turn.finish_reason] ? h("span", { class: "chip warn" }, FINISHES[turn.finish_reason]) : null,
    turn.done ? h("span", { class: "chip" }, "episode over") : null,
  ];
  return h(
    "section",
    { class: "card moment", "aria-label": `Turn ${index + 1}` },
    h("header", { class: "row stats" },
      h("h2", {}, h("a", { href: addressOf(index + 1), title: "Link to this turn" }, `Turn ${index + 1}`)), facts),
  );
}

function fact(name, value) {
  return h("span", {}, h("span", { class: "muted" }, `${name} `), value);
}

function blocks(message, plainKind, isFolded) {
  const texts = message.pieces.filter(([kind, text]) => kind || isContent(text, message.pieces));
  return texts.flatMap(([kind, text]) => block(kind || plainKind, text, isFolded || kind === "instruction" || kind === "acknowledgement"));
}

/** Labels such as “Thought:” are left out beside the parts they announce; a message without parts is shown whole. */
function isContent(text, pieces) {
  return text.trim() && pieces.every(([kind]) => !kind);
}

function block(kind, text, isFolded = false) {
  const title = TITLES[kind] ?? (kind || "Text");
  const body = h("div", { class: "text long", tabindex: 0, role: "group", "aria-label": title }, text || "(empty)");
  if (isFolded) return [h("details", { class: `part ${kind}` }, h("summary", {}, title), body)];
  return [h("div", { class: `part ${kind}` }, h("h3", {}, title), body)];
}
