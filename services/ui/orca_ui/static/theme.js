// Runs before the first paint: the theme that was chosen here, otherwise the system's.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* storage is off: the system's theme */ }
