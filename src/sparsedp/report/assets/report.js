
(() => {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const read = () => { try { return localStorage.getItem("sparsedp-theme"); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem("sparsedp-theme", theme); } catch { /* private window */ } };
  let theme = themes.includes(read()) ? read() : "auto";
  const show = () => {
    if (theme === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", theme);
    button.textContent = "Theme: " + theme;
    button.setAttribute("aria-label", "Colour theme: " + theme + ". Press to change.");
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    keep(theme);
    show();
  });
  show();
})();
