// The registry of pages: each module below adds its page when it is loaded.

import "./runs.js";
import "./trajectories.js";
import "./items.js";
import "./run.js";
import "./trajectory.js";
import "./compare.js";
import "./play.js";
import "./export.js";
