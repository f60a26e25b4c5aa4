// Brings what comes to the parts of the page.

import "./engines.js";
import "./queue.js";
import "./requests.js";
import "./failures.js";
import "./chat.js";
import { say } from "./dom.js";
import { follow, key } from "./live.js";
import { Store } from "./store.js";

const store = new Store();
const parts = [...document.querySelectorAll("orca-engines, orca-queue, orca-requests, orca-failures, orca-story")];
const connection = document.getElementById("connection");

let drawing = false;
function draw() {
  if (drawing) return; // once a frame is enough, however many messages come
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const part of parts) part.draw(store);
    tellConnection("");
  });
}

function tellConnection(why) {
  const away = Object.values(store.schedulers).filter((one) => one.why);
  const running = Object.values(store.engines).filter((one) => one.why === null).length;
  const all = Object.keys(store.engines).length;
  connection.classList.toggle("bad", why !== "" || running < all);
  if (why) say(connection, why);
  else if (away.length) say(connection, `a scheduler ${away[0].why}; ${running} of ${all} engines run`);
  else say(connection, all ? (running === all ? (all === 1 ? "live: the engine runs" : `live: all ${all} engines run`) : `live: ${running} of ${all} engines run`) : "live: there is no engine yet");
}

document.addEventListener("story", (event) => {
  document.querySelector("orca-story").show(event.detail, store);
});
window.addEventListener("resize", draw);

const theme = document.getElementById("theme");
const dark = () =>
  (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => say(theme, dark() ? "Light" : "Dark");
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  try {
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  } catch { /* storage is off: for this visit alone */ }
  nameTheme();
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  nameTheme();
  draw();
});
nameTheme();

const asking = document.getElementById("key");
asking.addEventListener("cancel", (event) => event.preventDefault());
function ask() {
  say(document.getElementById("key-wrong"), key.value ? "That key is not valid here." : "");
  return new Promise((resolve) => {
    asking.addEventListener("close", () => {
      key.value = asking.querySelector("input").value.trim();
      document.querySelector("orca-chat").begin();
      resolve();
    }, { once: true });
    asking.showModal();
  });
}

follow(
  (message) => {
    store.take(message);
    draw();
  },
  (why) => tellConnection(why),
  ask,
);
