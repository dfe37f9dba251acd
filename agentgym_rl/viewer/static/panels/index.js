// The registry of panels: what stands beside the turns of a trajectory.

const panels = [];

/**
 * Make a panel known. `create({record, main, signal})` gets the trajectory's JSON and an empty element to draw in; it
 * returns (perhaps later) null when it has nothing to show of this trajectory, else `{title, show}`, where `show(turn)`
 * draws the state after so many turns (0: before the first).
 */
export function addPanel(create) {
  panels.push(create);
}

/** All panels that have something to show of the trajectory: `[{title, element, show}]`. */
export async function createPanels(record, signal) {
  const made = panels.map(async (create) => {
    const element = document.createElement("div");
    const panel = await create({ record, main: element, signal });
    return panel && { ...panel, element };
  });
  return (await Promise.all(made)).filter(Boolean);
}
