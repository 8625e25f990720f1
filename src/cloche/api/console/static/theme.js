// Before anything is drawn: the theme that was chosen here, if one was.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("cloche-theme");
  } catch {
    // a browser that keeps nothing follows the system
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
