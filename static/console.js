/* What the pages do beyond forms and links. All of it is comfort: without it, everything still works. */
"use strict";

// The reader's zone, so that the server writes times as the reader's clock does.
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
if (zone && !document.cookie.split("; ").includes(`zone=${zone}`)) {
  document.cookie = `zone=${zone}; path=/; max-age=31536000; samesite=lax`;
  if (document.cookie.includes("zone=") && document.querySelector("time")) location.reload();
}

const typing = () => document.activeElement?.matches("input:not([type=checkbox]), textarea, select");

function press(key) {
  const target = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  if (!target) return false;
  const details = target.closest("details");
  if (details && target.matches("summary")) {
    details.open = true;
    details.querySelector("textarea, select, input:not([type=hidden]), button")?.focus();
  } else {
    target.focus();
    target.click();
  }
  return true;
}

function step(by) {
  const links = [...document.querySelectorAll(".rows a.what")];
  if (!links.length) return false;
  const at = links.indexOf(document.activeElement);
  links[Math.min(links.length - 1, Math.max(0, at < 0 ? 0 : at + by))].focus();
  return true;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    const open = document.activeElement?.closest("details[open]");
    if (open) { open.open = false; open.querySelector("summary").focus(); }
    else if (typing()) document.activeElement.blur();
    return;
  }
  if (typing()) return;
  const done = event.key === "/" ? (document.getElementById("q")?.select(), document.getElementById("q")?.focus(), true)
    : event.key === "j" ? step(1)
    : event.key === "k" ? step(-1)
    : /^[a-z]$/i.test(event.key) && press(event.key.toLowerCase());
  if (done) event.preventDefault();
});

// One menu at a time, and none when the reader turns to something else.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.chip[open], details.me[open]"))
    if (!menu.contains(event.target)) menu.open = false;
});

// A form that is open is being written in: polling leaves its panel, with the version it was drawn with, alone, also
// where the action is not possible any more. Sending it then says what changed, and keeps the words.
document.addEventListener("toggle", (event) => {
  const panel = event.target.matches("details.act") && event.target.closest("section");
  if (panel) panel.toggleAttribute("hx-morph-skip", !!panel.querySelector("details.act[open]"));
}, true);
document.addEventListener("htmx:after:swap", () => {
  const page = document.querySelector("[data-version]");
  for (const open of document.querySelectorAll("details.act[open]")) {
    const drawn = open.querySelector("[name=version]")?.value;
    const note = open.querySelector(".stale");
    if (page && drawn && note) note.hidden = drawn === page.dataset.version;
  }
});

// A page that no longer follows the ledger says so; what is typed in it stays.
let seen = new Date();
function behind(why) {
  const note = document.getElementById("behind");
  if (!why) seen = new Date();
  note.textContent = why && `${why} What you see is from ${seen.toLocaleTimeString()}.`;
  note.hidden = !why;
}
document.addEventListener("htmx:after:request", (event) => {
  const status = event.detail.ctx.response.status;
  behind(status === 401 ? "You are signed out; sign in again in another tab to keep what you have typed here."
    : status >= 400 ? "The console answers with an error." : "");
});
document.addEventListener("htmx:error", () => behind("The console cannot be reached."));

// Nobody looks at a page in the background: it asks again when it is seen.
document.addEventListener("htmx:before:request", (event) => { if (document.hidden) event.preventDefault(); });

// A double click is one press. The token says so to the server as well.
document.addEventListener("submit", (event) => {
  if (event.target.method !== "post") return;
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "1";
});
addEventListener("pageshow", () => { for (const form of document.forms) delete form.dataset.sent; });
