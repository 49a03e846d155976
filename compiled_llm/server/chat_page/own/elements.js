// Elements of the page, and how numbers are written in them.

export const byId = (id) => document.getElementById(id);

export const element = (name, text = "", className = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
};

export function button(text, action, className = "") {
  const made = element("button", text, className);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

export function show(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

export const count = (value) => (value === undefined ? "–" : Math.round(value).toLocaleString("en"));

export function seconds(value) {
  if (value === undefined) return "–";
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value >= 10) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return `${(1000 * value).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
}

// Where the page is not on HTTPS or this machine, browsers have no clipboard but the old command.
export async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", text, "unseen");
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    from.focus();
  }
  const name = from.textContent;
  if (name === "Copied") return;
  from.textContent = "Copied";
  setTimeout(() => (from.textContent = name), 1500);
}
