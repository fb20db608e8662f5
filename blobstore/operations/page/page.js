"use strict";
// Draws what Python has computed. Texts become text nodes or are painted; nothing is parsed as markup.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const VIEWS = {};
  let query = "";

  // Elements

  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (key === "background") made.style.background = value;
      else if (key === "width") made.style.width = value;
      else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.filter(child => child !== null && child !== undefined && child !== false));
    return made;
  }
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Numbers

  function bytes(count) {
    if (count === null || count === undefined) return "\u2013";
    for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
      if (count >= size) return `${+(count / size).toPrecision(3)} ${unit}`;
    return `${count} B`;
  }
  const number = count => count === null ? "\u2013" : count.toLocaleString("en");
  const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
  const digits = value => value === null || value === undefined ? "\u2013" : String(+value.toPrecision(3));
  const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "\u2013";
  const date = seconds => seconds ? new Date(seconds * 1e3).toISOString().slice(0, 16).replace("T", " ") : "unknown";
  const isFound = name => !query || name.toLowerCase().includes(query);

  // Colours

  function parsed(text) {
    const hex = text.replace("#", "");
    return [0, 2, 4].map(at => parseInt(hex.slice(at, at + 2), 16));
  }
  const ramps = new Map();
  function ramp(part) {
    // From --low over --mid to --high, in 64 steps.
    const step = Math.max(0, Math.min(63, Math.round(part * 63)));
    if (!ramps.has(step)) {
      const ends = ["low", "mid", "high"].map(name => parsed(colour(name)));
      const at = step / 63 * 2, low = Math.min(1, Math.floor(at));
      const mixed = ends[low].map((value, i) => Math.round(value + (ends[low + 1][i] - value) * (at - low)));
      ramps.set(step, "#" + mixed.map(value => value.toString(16).padStart(2, "0")).join(""));
    }
    return ramps.get(step);
  }
  function ink(back) {
    const [red, green, blue] = parsed(back);
    return .299 * red + .587 * green + .114 * blue > 140 ? "#15191d" : "#ffffff";
  }

  // A picture of cells, painted on a canvas that shows the visible part of a larger area

  const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const said = el("div", { class: "seen", role: "status", "aria-live": "polite" });

  class Plot {
    // picture: label, height(width), area(width, height, zoom), cells(x, y, w, h) of the visible cells as
    // {x, y, w, h, fill, text, sub, item}, order (items for the keyboard), box(item), describe(item), open(item)
    constructor(picture) {
      this.picture = picture;
      this.order = picture.order;
      this.zoom = 1;
      this.focus = -1;
      this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": picture.label });
      this.space = el("div", { class: "space" });
      this.box = el("div", { class: "plot" }, this.canvas, this.space);
      this.box.addEventListener("scroll", () => this.later(), { passive: true });
      this.canvas.addEventListener("mousemove", event => this.hover(event));
      this.canvas.addEventListener("mouseleave", () => { tip.hidden = true; this.over = null; this.later(); });
      this.canvas.addEventListener("click", event => { const cell = this.at(event); if (cell) this.choose(cell.item); });
      this.canvas.addEventListener("keydown", event => this.key(event));
      this.box.addEventListener("wheel", event => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.scale(event.deltaY < 0 ? 1.25 : .8, event);
      }, { passive: false });
      new ResizeObserver(() => this.resize()).observe(this.box);
      const zoomed = (text, name, factor) => el("button", { type: "button", "aria-label": name, title: name, onclick: () => this.scale(factor) }, text);
      this.buttons = el("span", { class: "group push" }, zoomed("\u2212", "Zoom out", 2 / 3), zoomed("+", "Zoom in", 1.5));
    }
    resize() {
      const width = this.box.clientWidth;
      if (!width) return;
      const height = Math.round(this.picture.height(width));
      [this.width, this.height] = this.picture.area(width, height, this.zoom);
      this.viewHeight = Math.min(height, Math.ceil(this.height));
      this.viewWidth = width;
      this.box.style.height = this.viewHeight + 2 + "px";
      this.space.style.width = this.width + "px";
      this.space.style.height = this.height + "px";
      const ratio = Math.min(window.devicePixelRatio || 1, 3);
      if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(this.viewHeight * ratio)) {
        this.canvas.width = Math.round(width * ratio);
        this.canvas.height = Math.round(this.viewHeight * ratio);
        this.canvas.style.width = width + "px";
        this.canvas.style.height = this.viewHeight + "px";
      }
      this.ratio = ratio;
      this.draw();
    }
    later() {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    }
    draw() {
      if (!this.width) return;
      const context = this.canvas.getContext("2d");
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      context.fillStyle = colour("gap");
      context.fillRect(0, 0, this.viewWidth, this.viewHeight);
      const left = this.box.scrollLeft, top = this.box.scrollTop;
      this.visible = this.picture.cells(left, top, this.viewWidth, this.viewHeight, this);
      context.textBaseline = "middle";
      const isChosen = this.order()[this.focus];
      for (const cell of this.visible) {
        const x = cell.x - left, y = cell.y - top;
        context.globalAlpha = cell.faded ? .22 : 1;
        if (cell.fill) {
          context.fillStyle = cell.fill;
          context.fillRect(x, y, cell.w, cell.h);
        }
        if (cell.hatched) this.hatch(context, x, y, cell.w, cell.h);
        const item = cell.item;
        if (item !== undefined && (item === isChosen || item === this.over)) {
          context.globalAlpha = 1;
          context.strokeStyle = colour("text");
          context.lineWidth = 2;
          context.strokeRect(x + 1, y + 1, Math.max(cell.w - 2, 1), Math.max(cell.h - 2, 1));
        }
      }
      for (const cell of this.visible) if (cell.text) this.label(context, cell, left, top);
      context.globalAlpha = 1;
      if (this.picture.frame) this.picture.frame(context, left, top, this);
      this.canvas.dataset.drawn = this.visible.length;
    }
    hatch(context, x, y, w, h) {
      context.save();
      context.beginPath();
      context.rect(x, y, w, h);
      context.clip();
      context.strokeStyle = "rgba(255,255,255,.35)";
      context.lineWidth = 1.5;
      context.beginPath();
      for (let at = x - h; at < x + w; at += 8) { context.moveTo(at, y + h); context.lineTo(at + h, y); }
      context.stroke();
      context.restore();
    }
    label(context, cell, left, top) {
      const size = cell.size || 13;
      if (cell.w < 30 || cell.h < size + 3) return;
      const x = cell.x - left, y = cell.y - top, pad = cell.centre ? 0 : 8;
      context.globalAlpha = cell.faded ? .3 : 1;
      context.fillStyle = cell.ink || (cell.fill ? ink(cell.fill) : colour("text"));
      context.font = `${cell.bold ? 600 : 400} ${size}px system-ui, sans-serif`;
      const text = fitted(context, cell.text, cell.w - (cell.centre ? 4 : 14));
      if (cell.centre) {
        context.textAlign = "center";
        context.fillText(text, x + cell.w / 2, y + cell.h / 2);
      } else {
        context.textAlign = "left";
        context.fillText(text, x + pad, y + pad + size / 2 + 1);
        if (cell.sub && cell.h > 2 * size + 16) {
          context.font = `400 ${size - 1}px system-ui, sans-serif`;
          context.globalAlpha *= .82;
          context.fillText(fitted(context, cell.sub, cell.w - 14), x + pad, y + pad + size * 1.5 + 5);
        }
      }
    }
    at(event) {
      const bounds = this.canvas.getBoundingClientRect();
      const x = event.clientX - bounds.left + this.box.scrollLeft, y = event.clientY - bounds.top + this.box.scrollTop;
      return (this.visible || []).find(cell => cell.item !== undefined && x >= cell.x && x < cell.x + cell.w && y >= cell.y && y < cell.y + cell.h);
    }
    hover(event) {
      const cell = this.at(event);
      if ((cell && cell.item) !== this.over) { this.over = cell ? cell.item : null; this.later(); }
      tip.hidden = !cell;
      if (!cell) return;
      tip.textContent = this.picture.describe(cell.item);
      const { offsetWidth: w, offsetHeight: h } = tip;
      tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - w - 6)) + "px";
      tip.style.top = (event.clientY + 18 + h > innerHeight ? Math.max(6, event.clientY - h - 10) : event.clientY + 18) + "px";
    }
    choose(item) {
      this.focus = this.order().indexOf(item);
      this.picture.open(item);
      this.later();
    }
    key(event) {
      const order = this.order(), columns = this.picture.columns ? this.picture.columns() : 1;
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
      if (event.key === "+" || event.key === "-") this.scale(event.key === "+" ? 1.5 : 2 / 3);
      else if (event.key === "Enter" || event.key === " ") { if (order[this.focus] !== undefined) this.picture.open(order[this.focus]); }
      else if (event.key === "Home" || event.key === "End" || step) {
        const next = event.key === "Home" ? 0 : event.key === "End" ? order.length - 1 : this.focus < 0 ? 0 : this.focus + step;
        if (next < 0 || next >= order.length) return event.preventDefault();
        this.focus = next;
        const bounds = this.picture.place(order[next], this);
        if (bounds) this.reveal(bounds);
        said.textContent = this.picture.describe(order[next]);
        this.later();
      } else return;
      event.preventDefault();
    }
    reveal({ x, y, w, h }) {
      const head = this.picture.head || { w: 0, h: 0 };
      if (x - head.w < this.box.scrollLeft) this.box.scrollLeft = x - head.w;
      else if (x + w > this.box.scrollLeft + this.viewWidth) this.box.scrollLeft = x + w - this.viewWidth;
      if (y - head.h < this.box.scrollTop) this.box.scrollTop = y - head.h;
      else if (y + h > this.box.scrollTop + this.viewHeight) this.box.scrollTop = y + h - this.viewHeight;
    }
    scale(factor, event) {
      const before = this.zoom;
      this.zoom = Math.max(this.picture.least || 1, Math.min(32, this.zoom * factor));
      if (Math.abs(this.zoom - 1) < .05) this.zoom = 1;
      const bounds = this.canvas.getBoundingClientRect();
      const px = event ? event.clientX - bounds.left : this.viewWidth / 2, py = event ? event.clientY - bounds.top : this.viewHeight / 2;
      const x = (this.box.scrollLeft + px) * this.zoom / before - px, y = (this.box.scrollTop + py) * this.zoom / before - py;
      this.resize();
      this.box.scrollLeft = x;
      this.box.scrollTop = y;
      this.draw();
    }
  }
  function fitted(context, text, width) {
    if (context.measureText(text).width <= width) return text;
    let low = 0, high = text.length;
    while (low < high) {
      const middle = low + high + 1 >> 1;
      if (context.measureText(text.slice(0, middle) + "\u2026").width <= width) low = middle; else high = middle - 1;
    }
    return low > 1 ? text.slice(0, low) + "\u2026" : "";
  }

  // Parts of views

  const plots = new Set();
  function plot(picture) {
    const made = new Plot(picture);
    plots.add(made);
    return made;
  }
  function redraw() {
    ramps.clear();
    for (const made of plots) if (made.box.isConnected) made.resize(); else plots.delete(made);
  }
  function facts(entries) {
    return el("dl", { class: "facts" }, ...entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }
  function legend(entries) {
    return el("ul", { class: "legend" }, ...entries.map(([name, label, value]) => el("li", {}, el("i", { background: `var(--${name})` }), label, value ? " " : "", value ? el("b", {}, value) : "")));
  }
  function ramped(low, high, label) {
    return el("ul", { class: "legend" }, el("li", {}, label, " "), el("li", {}, el("b", {}, low), "\u2002",
      el("i", { class: "ramp", background: "linear-gradient(to right, var(--low), var(--mid), var(--high))" }), el("b", {}, high)));
  }
  function choice(options, chosen, act, label) {
    const group = el("span", { class: "group", role: "group", "aria-label": label });
    for (const [value, text] of options)
      group.append(el("button", { type: "button", "aria-pressed": String(value === chosen), onclick: event => {
        for (const button of group.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
        act(value);
      } }, text));
    return group;
  }
  // The table behind a picture is made when it is opened; rows may come from a function.
  function behind(caption, heads, rows) {
    const made = el("details", {}, el("summary", {}, "Table"));
    made.addEventListener("toggle", () => {
      if (!made.open || made.querySelector("table")) return;
      const isNumber = heads.map(head => head.startsWith("#"));
      const body = el("tbody"), all = rows(), kind = at => isNumber[at] ? { class: "n" } : {};
      const fill = () => {
        for (const row of all.splice(0, 500))
          body.append(el("tr", {}, ...row.map((value, at) => at ? el("td", kind(at), String(value)) : el("th", { scope: "row", title: String(value) }, String(value)))));
        if (all.length) more.textContent = `Show ${number(Math.min(500, all.length))} of ${number(all.length)} more rows`; else more.remove();
      };
      const more = el("button", { type: "button", onclick: fill });
      made.append(el("div", { class: "wide", tabindex: 0 }, el("table", {}, el("caption", {}, caption),
        el("thead", {}, el("tr", {}, ...heads.map((head, at) => el("th", { scope: "col", ...kind(at) }, head.replace("#", ""))))), body), more));
      fill();
    });
    return made;
  }
  function listed(entries) {
    return el("dl", {}, ...entries.filter(Boolean).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }
  const link = (hash, text) => el("a", { href: hash }, text);
  const modelLink = name => link("#model/" + encodeURIComponent(name), name);
  const heading = (question, lead) => [el("h2", {}, question), el("p", { class: "lead" }, lead)];
  const hint = () => el("p", { class: "hint" }, "Arrow keys move, Enter opens, + and \u2212 zoom; so does the wheel with Ctrl.");

  // The store

  const KINDS = {
    unique: "only in one model", cold: "only in one model, compressed", shared: "shared",
    base: "bases of frozen blobs", garbage: "garbage", other: "other files",
  };
  VIEWS.store = {
    title: "Store",
    show(section) {
      const { totals, models } = DATA.store;
      section.append(...heading("What would a removal free?",
        "Each area is space on disk. Blue areas are free once their model is removed and \u201cblobstore gc\u201d has run; shared areas only once every model that uses them is removed."));
      section.append(facts([
        ["on disk", bytes(totals.bytes_in_all)], ["models", number(totals.models)], ["blobs", number(totals.blobs)],
        ["without sharing", bytes(totals.bytes_without_sharing)],
        ...(totals.saved ? [["saved by compression", bytes(totals.saved)]] : []),
        ["garbage", bytes(totals.unreferenced)],
      ]));
      if (!DATA.store.freed.cells.length && !models.length) {
        section.append(el("p", { class: "empty" }, "The store is empty. \u201cblobstore create\u201d imports a model."));
        return;
      }
      let mode = "freed";
      const panel = el("div", { class: "panel", hidden: true, "aria-live": "polite" });
      const keys = el("div"), name = cell => cell[1] < 0 ? cell[4] : models[cell[1]].name;
      const matches = cell => cell[1] < 0 ? !query || cell[5].some(at => isFound(models[at].name)) : isFound(models[cell[1]].name);
      const layout = made => DATA.store[mode][made.viewWidth > made.viewHeight ? "wide" : "tall"];
      const place = (at, made) => {
        const numbers = layout(made), wide = made.viewWidth > made.viewHeight ? 2000 : 800;
        const fx = made.width / wide, fy = made.height / 1000;
        const [x, y, w, h] = numbers.slice(4 * at, 4 * at + 4);
        return { x: x * fx, y: y * fy, w: w * fx, h: h * fy };
      };
      const describe = at => {
        const cell = DATA.store[mode].cells[at];
        const lines = [name(cell), `${bytes(cell[2])} in ${plural(cell[3], cell[0] === "other" ? "file" : "blob")}, ${KINDS[cell[0]]}`];
        if (cell[5].length) lines.push(cell[5].slice(0, 6).map(i => models[i].name).join(", ") + (cell[6] > 6 ? ` and ${cell[6] - 6} more` : ""));
        return lines.join("\n");
      };
      const map = plot({
        label: "Treemap of the store. The table below has the same numbers.",
        height: width => width < 620 ? Math.min(1.25 * width, 620) : Math.max(300, Math.min(.5 * width, 600)),
        area: (width, height, zoom) => [width * zoom, height * zoom],
        order: () => DATA.store[mode].cells.map((_, at) => at),
        place, describe,
        cells(left, top, w, h, made) {
          const fills = Object.fromEntries(Object.keys(KINDS).map(kind => [kind, colour(kind)]));
          const found = [];
          DATA.store[mode].cells.forEach((cell, at) => {
            const box = place(at, made);
            if (box.x + box.w < left || box.x > left + w || box.y + box.h < top || box.y > top + h) return;
            const gap = Math.min(2, box.w / 4, box.h / 4);
            found.push({ x: box.x, y: box.y, w: box.w - gap, h: box.h - gap, fill: fills[cell[0]], text: name(cell),
              sub: bytes(cell[2]), bold: cell[1] >= 0, item: at, faded: !matches(cell), hatched: cell[0] === "garbage" });
          });
          return found;
        },
        open(at) {
          const cell = DATA.store[mode].cells[at], model = models[cell[1]];
          panel.hidden = false;
          panel.replaceChildren(el("h3", {}, name(cell)), model ? listed([
            ["a removal frees", `${bytes(model.unique)} of ${bytes(model.size)}`], ["shared", bytes(model.shared)],
            ["blobs", number(model.blobs)], ["ID", model.id || "\u2013"], ["written", date(model.modified)],
            model.error && ["error", model.error], model.faults.length && ["faults", model.faults.join("; ")],
          ]) : listed([["on disk", bytes(cell[2])], [cell[0] === "other" ? "files" : "blobs", number(cell[3])], ["what", KINDS[cell[0]]]]));
          if (cell[6]) panel.append(el("p", {}, plural(cell[6], "model")), el("ul", {}, ...cell[5].map(i => el("li", {}, modelLink(models[i].name))), cell[6] > cell[5].length ? el("li", {}, `and ${cell[6] - cell[5].length} more`) : null));
          if (model) panel.append(el("p", {}, modelLink(model.name)));
        },
      });
      const key = () => {
        const sums = {};
        for (const cell of DATA.store[mode].cells) sums[cell[0]] = (sums[cell[0]] || 0) + cell[2];
        keys.replaceChildren(legend(Object.entries(KINDS).filter(([kind]) => sums[kind]).map(([kind, label]) => [kind, label, bytes(sums[kind])])));
      };
      key();
      section.append(
        el("div", { class: "tools" }, choice([["freed", "Freed by a removal"], ["size", "Total size"]], mode, value => {
          mode = value; map.focus = -1; panel.hidden = true; key(); map.draw();
        }, "Area"), map.buttons),
        map.box, keys, hint(), panel,
        behind("Disk usage of the models, as \u201cblobstore du\u201d prints it", ["Model", "#On disk", "#Freed by its removal", "#Shared", "#Blobs", "Fault"],
          () => models.filter(model => isFound(model.name)).map(model => [model.name, bytes(model.size), bytes(model.unique), bytes(model.shared), number(model.blobs), model.error || model.faults[0] || ""])));
      for (const model of models.filter(model => model.error || model.faults.length).slice(0, 20))
        section.append(el("p", { class: "alarm" }, `${model.name}: ${model.error || model.faults[0]}`));
    },
  };

  // The frame

  const names = Object.keys(VIEWS).filter(name => DATA[name]);
  const tabs = el("nav", { "aria-label": "Views" }, ...names.map(name => el("a", { href: "#" + name }, VIEWS[name].title)));
  const search = el("input", { type: "search", placeholder: "Search names", "aria-label": "Search names of models and tensors" });
  const main = el("main");
  function route() {
    const [name, ...rest] = location.hash.slice(1).split("/");
    const view = names.includes(name) ? name : names[0];
    tabs.querySelectorAll("a").forEach((tab, at) => names[at] === view ? tab.setAttribute("aria-current", "page") : tab.removeAttribute("aria-current"));
    const section = el("section", { id: "view-" + view });
    tip.hidden = true;
    main.replaceChildren(section);
    let argument = rest.join("/");
    try { argument = decodeURIComponent(argument); } catch { /* someone typed it */ }
    VIEWS[view].show(section, argument);
    redraw();
  }
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      query = search.value.trim().toLowerCase();
      for (const made of plots) if (made.box.isConnected) made.draw();
      document.dispatchEvent(new Event("searched"));
    }, 60);
  });
  addEventListener("hashchange", route);
  addEventListener("beforeprint", redraw);
  addEventListener("afterprint", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.body.append(
    el("header", {}, el("h1", {}, DATA.root), el("p", {}, `blobstore, as of ${date(DATA.written)} UTC`)),
    el("div", { class: "bar" }, tabs, search), main, tip, said);
  route();
})();
