// What stands out in a trajectory, as a reader would find it by going through the turns.

import { isFault } from "./outcome.js";

/**
 * Sentences `{text, turn, other}`: `turn` (counted from 1, or null) is the first that shows it, `other` (or null) the id
 * of a trajectory that it is best seen beside.
 */
export function findings(record) {
  const inTurns = inOne(record).map(([text, turn]) => ({ text, turn, other: null }));
  return [...inTurns, ...besideOthers(record)];
}

function inOne({ summary, turns, messages, goal }) {
  const actions = turns.map((turn) => actionOf(messages, turn));
  const found = [
    isFault(summary) ? ["A fault: it is not trained on and counts in no average.", null] : null,
    contradiction(summary, turns, goal),
    summary.max_rounds > 0 && turns.length === summary.max_rounds && summary.stop_reason === "max_rounds"
      ? [`All ${summary.max_rounds} turns of the horizon were used.`, turns.length]
      : null,
    counted(turns.map((turn) => turn.finish_reason === "length"), "cut at max_tokens"),
    counted(actions.map((action, index) => action === null && hasParts(messages, turns[index])), "without an action"),
    repeated(actions, turns),
    counted(turns.map((turn) => turn.reward < 0), "with a negative reward"),
    lastReward(turns),
  ];
  return found.filter(Boolean);
}

/** The environment's panel follows its words, the result its rewards: where the two differ, one of them is wrong. */
function contradiction(summary, turns, goal) {
  if (isFault(summary) || summary.success === null || !goal.is_followed) return null;
  const at = goal.reached_at;
  if (summary.success && at === null) return ["A success, but the panel shows the goal as reached at no turn.", turns.length || null];
  if (summary.success || at === null) return null;
  const reward = at ? `turn ${at} was paid ${turns[at - 1].reward ?? "nothing"}` : "before any turn";
  return [`The panel shows the goal as reached ${at ? `after turn ${at}` : "at the start"}, but there is no success: ${reward}.`, at || null];
}

/** Of a failure: whether others of its group succeeded, the shortest of whom it can be compared with. */
function besideOthers({ summary, group }) {
  const successes = group.filter((each) => each.success);
  if (summary.success || !successes.length) return [];
  const shortest = successes.reduce((best, each) => (each.turns < best.turns ? each : best));
  const text = `${successes.length} of ${group.length} in the group succeeded: compare with sample ${shortest.sample_index}.`;
  return [{ text, turn: null, other: shortest.id }];
}

function actionOf(messages, { message }) {
  if (message === null) return null;
  return messages[message].pieces.find(([kind]) => kind === "action")?.[1].trim() ?? null;
}

/** False where the row does not tell parts apart, so that the lack of an action says nothing. */
function hasParts(messages, { message }) {
  return message !== null && messages[message].pieces.some(([kind]) => kind);
}

function counted(marks, words) {
  const count = marks.filter(Boolean).length;
  return count ? [`${count} of ${marks.length} turns ${words}.`, marks.indexOf(true) + 1] : null;
}

/** The longest stretch of one action with the same answer. */
function repeated(actions, turns) {
  let best = [1, 0];
  for (let start = 0; start < actions.length; ) {
    let end = start + 1;
    while (end < actions.length && actions[end] !== null && actions[end] === actions[start] && turns[end].observation === turns[start].observation) end += 1;
    if (end - start > best[0]) best = [end - start, start];
    start = end;
  }
  const [length, start] = best;
  return length > 1 ? [`“${short(actions[start])}” ${length} times in a row, with the same answer.`, start + 1] : null;
}

function lastReward(turns) {
  const last = turns.findLastIndex((turn) => turn.reward > 0);
  return last >= 0 && last < turns.length - 1 ? [`No reward after turn ${last + 1}.`, last + 1] : null;
}

function short(text) {
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}
