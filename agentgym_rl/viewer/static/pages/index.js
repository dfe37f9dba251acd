// The registry of pages: each module below adds its page when it is loaded.

import "./runs.js";
