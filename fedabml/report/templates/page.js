"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, at = document) => [...at.querySelectorAll(query)];
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);

  // Theme: the system's wish, unless the address ends in #dark or #light or the button is pressed.
  const wish = location.hash.slice(1);
  if (wish === "dark" || wish === "light") root.dataset.theme = wish;
  byId("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
  });

  // Legend: a name hides its run in every figure and dims it in the table.
  const hidden = new Set();
  for (const button of all("[data-legend]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.legend);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      for (const part of all(`[data-run="${run}"]`)) part.classList.toggle("off", hidden.has(run));
    });
  }

  // The legend inside a picture: a name hides its series there, by pointer or keyboard.
  for (const entry of all(".entry")) {
    const press = () => {
      const off = entry.getAttribute("aria-pressed") === "true";
      entry.setAttribute("aria-pressed", String(!off));
      for (const part of all(`[data-of="${entry.dataset.series}"]`, entry.closest("svg"))) part.classList.toggle("off", off);
    };
    entry.addEventListener("click", press);
    entry.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      press();
    });
  }

  // Hover texts: what is under the pointer, or the nearest dot or curve of the same picture within 24 pixels.
  const tip = byId("tip");
  let lit = null;
  const places = new WeakMap();
  function spots(mark) {
    if (!places.has(mark)) {
      const line = mark.getAttribute("fill") === "none" && mark.getAttribute("d");
      const words = line || mark.getAttribute("transform") || `${mark.getAttribute("cx")} ${mark.getAttribute("cy")}`;
      places.set(mark, words.match(/[-\d.]+ [-\d.]+/g).map((pair) => pair.split(" ").map(Number)));
    }
    return places.get(mark);
  }
  function away(mark, x, y) { // the square of the distance to a dot, or to the nearest piece of a curve
    let [[ax, ay]] = spots(mark), least = Infinity;
    for (const [bx, by] of spots(mark)) {
      const dx = bx - ax, dy = by - ay;
      const share = Math.min(Math.max(((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1), 0), 1);
      least = Math.min(least, (ax + share * dx - x) ** 2 + (ay + share * dy - y) ** 2);
      ax = bx;
      ay = by;
    }
    return least;
  }
  function nearest(svg, event) {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    let found = null, least = (24 * scale) ** 2, alike = 0;
    for (const dot of all("g:not(.off) > [data-tip]", svg)) {
      const distance = away(dot, x, y);
      if (distance < least) [found, least, alike] = [dot, distance, 0];
      else if (distance === least) alike += 1;
    }
    return found && [found, alike ? `${found.dataset.tip}\n${alike} more here` : found.dataset.tip];
  }
  function hover(event) {
    const over = event.target instanceof Element ? event.target : root;
    const svg = over.closest("svg");
    const bar = over.closest(".hit");
    const [at, words] = bar ? [bar, bar.dataset.tip] : (svg && svg.dataset.plot && nearest(svg, event)) || [null, ""];
    if (lit) lit.classList.remove("lit");
    lit = at;
    tip.hidden = !at;
    if (!at) return;
    at.classList.add("lit");
    const gone = all(".entry[aria-pressed=false]", svg).map((entry) => `${entry.getAttribute("aria-label")}: `);
    tip.replaceChildren(...words.split("\n").flatMap((line) => {
      const run = data.runs.findIndex((name) => line.startsWith(`${name}: `));
      if (hidden.has(run) || gone.some((name) => line.startsWith(name))) return [];
      const row = document.createElement("div");
      if (run >= 0) row.append(document.querySelector(`[data-legend="${run}"] i`).cloneNode(true));
      row.append(line);
      return [row];
    }));
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY > height + 24 ? event.clientY - height - 14 : event.clientY + 20}px`;
  }
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, hover, { passive: true });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // A client, chosen in the list or by pressing one of its marks, is lit in every figure.
  const people = [...new Set(all("[data-client]").map((mark) => mark.dataset.client))];
  let pick = null;
  function light() {
    const name = pick ? pick.value : "";
    root.toggleAttribute("data-chosen", name !== "");
    for (const mark of all("[data-client]")) {
      mark.classList.toggle("chosen", mark.dataset.client === name);
      if (mark.dataset.client === name) mark.parentNode.append(mark); // above the others
    }
  }
  if (people.length > 1) {
    const bar = document.createElement("p"), label = document.createElement("label");
    bar.className = "choose pick";
    pick = document.createElement("select");
    pick.id = "client";
    people.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    pick.append(new Option("none: press a curve or dot", ""));
    for (const name of people) pick.append(new Option(name, name));
    label.append("Client ", pick);
    bar.append(label);
    document.querySelector("[data-client]").closest("section").querySelector("h2").after(bar);
    pick.addEventListener("change", light);
    document.addEventListener("click", (event) => {
      const svg = event.target.closest("svg[data-plot]");
      const [mark] = (svg && !event.target.closest(".entry") && nearest(svg, event)) || [];
      if (!mark || !mark.dataset.client) return;
      pick.value = pick.value === mark.dataset.client ? "" : mark.dataset.client;
      light();
    });
  }

  // Tables: a heading sorts, a second press turns the order; what has no value stays last.
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table), body = table.tBodies[0];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const missing = (row) => row.cells[column].textContent === "–";
      const order = (a, b) => missing(a) - missing(b)
        || (down ? -1 : 1) * value(a).localeCompare(value(b), "en", { numeric: true });
      const numeric = (a, b) => missing(a) - missing(b) || (down ? -1 : 1) * (value(a) - value(b));
      const rows = [...body.rows];
      const numbers = rows.every((row) => missing(row) || !Number.isNaN(Number(value(row))));
      body.append(...rows.sort(numbers ? numeric : order));
    }));
  }

  // Tables that are wider than their place say so.
  const watch = new ResizeObserver((seen) => {
    for (const { target } of seen) target.previousElementSibling.hidden = target.scrollWidth <= target.clientWidth + 1;
  });
  for (const box of all(".scroll")) watch.observe(box);

  // Two runs, client by client: redraw the dots for the chosen pair and count who wins.
  const across = byId("across"), up = byId("up");
  function duel() {
    const svg = across.closest("figure").querySelector("svg");
    const [left, top, right, bottom, low, high] = svg.dataset.plot.split(" ").map(Number);
    const place = (v, from, to) => from + (v - low) / (high - low) * (to - from);
    const write = (v) => data.percent ? `${(100 * v).toFixed(1)}%` : String(Number(v.toPrecision(4)));
    const [a, b] = [Number(across.value), Number(up.value)], wins = data.tally[a][b];
    const group = svg.querySelector("g:last-of-type");
    group.dataset.radius ??= group.querySelector("circle")?.getAttribute("r") || 3;
    group.replaceChildren();
    for (const [i, client] of data.clients.entries()) {
      const [x, y] = [data.values[a][i], data.values[b][i]];
      if (x === null || y === null) continue;
      const winner = x === y ? 2 : (y > x) === data.percent ? 1 : 0;
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "path");
      const { colour, shape } = winner === 2 ? { ...data.marks[0], colour: "var(--muted)" } : data.marks[[a, b][winner]];
      const put = `translate(${place(x, left, right)} ${place(y, bottom, top)}) scale(${group.dataset.radius})`;
      for (const [key, value] of Object.entries({ d: shape, fill: colour, "fill-opacity": 0.8, transform: put })) {
        dot.setAttribute(key, value);
      }
      dot.dataset.client = client;
      dot.dataset.tip = `${client}\n${data.runs[a]}: ${write(x)}\n${data.runs[b]}: ${write(y)}`;
      group.append(dot);
    }
    light();
    svg.querySelector("[data-label=x]").textContent = data.runs[a];
    svg.querySelector("[data-label=y]").textContent = data.runs[b];
    byId("score").textContent =
      `${data.runs[b]} is better for ${wins[1]} clients, ${data.runs[a]} for ${wins[0]}; ${wins[2]} are equal.`;
  }
  if (across) {
    for (const choice of [across, up]) choice.addEventListener("change", duel);
    duel();
  }
  root.dataset.ready = "true";
})();
