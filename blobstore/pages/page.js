"use strict";
// Draws what Python has computed. Texts become text nodes or are painted; nothing is parsed as markup.
(() => {
  let DATA = JSON.parse(document.getElementById("data").textContent);
  const VIEWS = {};
  let query = "";
  let listening = new AbortController();

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
  const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
  const digits = value => { const found = real(value); return found === null ? "\u2013" : Number.isFinite(found) ? String(+found.toPrecision(3)) : found > 0 ? "\u221e" : "\u2212\u221e"; };
  const decibels = value => { const found = real(value); return found === null ? "\u2013" : `${Number.isFinite(found) ? found.toFixed(1) : digits(found)} dB`; };
  // Infinite numbers come as text, as JSON has none.
  const real = value => value === undefined || value === null ? null : typeof value === "string" ? value === "-inf" ? -Infinity : Infinity : value;
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
      // A part of a name tells something, a part of a number or of a sentence does not.
      const room = cell.w - (cell.centre ? 4 : 14), isWhole = cell.centre || cell.shorter;
      const text = isWhole ? [cell.text, cell.shorter || ""].find(text => context.measureText(text).width <= room) || "" : fitted(context, cell.text, room);
      if (cell.centre) {
        context.textAlign = "center";
        context.fillText(text, x + cell.w / 2, y + cell.h / 2);
      } else {
        context.textAlign = "left";
        context.fillText(text, x + pad, y + pad + size / 2 + 1);
        context.font = `400 ${size - 1}px system-ui, sans-serif`;
        if (cell.sub && cell.h > 2 * size + 16 && context.measureText(cell.sub).width <= room) {
          context.globalAlpha *= .82;
          context.fillText(cell.sub, x + pad, y + pad + size * 1.5 + 5);
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
      const order = this.order(), step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      const isRow = this.picture.beside && event.key !== "ArrowRight" && event.key !== "ArrowLeft";
      if (event.key === "+" || event.key === "-") this.scale(event.key === "+" ? 1.5 : 2 / 3);
      else if (event.key === "Enter" || event.key === " ") { if (order[this.focus] !== undefined) this.picture.open(order[this.focus]); }
      else if (event.key === "Home" || event.key === "End" || step) {
        const next = event.key === "Home" ? 0 : event.key === "End" ? order.length - 1 : this.focus < 0 ? 0 : isRow ? this.picture.beside(this.focus, step) : this.focus + step;
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
  // The start of a text that fits a width, or its end.
  function fitted(context, text, width, fromEnd = false) {
    if (context.measureText(text).width <= width) return text;
    const part = length => fromEnd ? "\u2026" + text.slice(text.length - length) : text.slice(0, length) + "\u2026";
    let low = 0, high = text.length;
    while (low < high) {
      const middle = low + high + 1 >> 1;
      if (context.measureText(part(middle)).width <= width) low = middle; else high = middle - 1;
    }
    return low > 1 ? part(low) : "";
  }

  // Parts of views

  const plots = new Set();
  let printing = false;
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
  const hint = () => el("p", { class: "hint typed" }, "Arrow keys move, Enter opens, + and \u2212 zoom; so does the wheel with Ctrl.");

  // The store

  const KINDS = {
    unique: "only in one model", cold: "only in one model, compressed", shared: "shared",
    garbage: "garbage", other: "other files",
  };
  const SHORT = { shared: "shared", garbage: "garbage", other: "other" };
  VIEWS.store = {
    title: "Store",
    show(section) {
      const { totals, models } = DATA.store;
      section.append(...heading("What would a removal free?",
        "Each area is space on disk. Blue areas are free once their model is removed and \u201cblobstore gc\u201d has run; shared areas only once every model that needs them, as a base of frozen blobs or otherwise, is removed."));
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
            found.push({ x: box.x, y: box.y, w: box.w - gap, h: box.h - gap, fill: fills[cell[0]], text: short(name(cell)), shorter: cell[1] < 0 && SHORT[cell[0]],
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
          if (cell[6]) panel.append(el("p", {}, plural(cell[6], "model")), el("ul", {}, ...cell[5].map(i => el("li", {}, DATA.model[models[i].name] ? modelLink(models[i].name) : models[i].name)), cell[6] > cell[5].length ? el("li", {}, `and ${cell[6] - cell[5].length} more`) : null));
          if (model && DATA.model[model.name]) panel.append(el("p", {}, modelLink(model.name)));
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

  // A grid of cells with heads that stay in sight

  // A higher grid scrolls within its box.
  const TALL = 720;
  function grid(options) {
    // label, rows, columns, rowHead(r), columnHead(c), cell(r, c) -> {fill, text, parts, faded} or null, describe(r, c),
    // open(r, c), wide and high (the usual size of a cell), leastText (the width from which cells have text), headWidth,
    // headHeight
    const { rows, columns } = options;
    const head = { w: 0, h: options.headHeight };
    const size = made => {
      const free = (made.viewWidth || 600) - head.w;
      const w = Math.max(options.least || 12, Math.min(options.wide, free / columns)) * made.zoom;
      return { w, h: Math.max(options.leastHigh || 12, options.square ? Math.min(options.high, Math.max(free / columns, options.least)) : options.high) * made.zoom };
    };
    const place = (at, made) => {
      const { w, h } = size(made);
      return { x: head.w + at % columns * w, y: head.h + Math.floor(at / columns) * h, w, h };
    };
    const filled = [];
    for (let row = 0; row < rows && rows * columns <= 50000; row++)
      for (let column = 0; column < columns; column++) if (options.cell(row, column)) filled.push(row * columns + column);
    const made = plot({
      label: options.label, head, least: .25, place,
      height: width => Math.min(head.h + rows * size({ viewWidth: width, zoom: made.zoom }).h, printing ? 8000 : Math.max(TALL, innerHeight * .72)),
      area(width, height, zoom) {
        head.w = Math.min(options.headWidth, width * .36);
        const { w, h } = size({ viewWidth: width, zoom });
        return [Math.max(head.w + columns * w, 1), head.h + rows * h];
      },
      order: () => filled,
      // The place in the order of the cell above or below: in the next row, the nearest column.
      beside(from, step) {
        const row = Math.floor(filled[from] / columns), column = filled[from] % columns;
        let at = from;
        while (at >= 0 && at < filled.length && Math.floor(filled[at] / columns) === row) at += step;
        if (at < 0 || at >= filled.length) return -1;
        const next = Math.floor(filled[at] / columns);
        let best = at;
        for (; at >= 0 && at < filled.length && Math.floor(filled[at] / columns) === next; at += step)
          if (Math.abs(filled[at] % columns - column) < Math.abs(filled[best] % columns - column)) best = at;
        return best;
      },
      describe: at => options.describe(Math.floor(at / columns), at % columns),
      open: at => options.open(Math.floor(at / columns), at % columns),
      cells(left, top, width, height, plot) {
        const { w, h } = size(plot), found = [];
        const first = [Math.max(0, Math.floor(left / w)), Math.max(0, Math.floor(top / h))];
        const last = [Math.min(columns, Math.ceil((left + width - head.w) / w)), Math.min(rows, Math.ceil((top + height - head.h) / h))];
        const gap = w > 8 && h > 8 ? 2 : w > 4 ? 1 : 0, hasText = w >= (options.leastText || 0);
        for (let row = first[1]; row < last[1]; row++)
          for (let column = first[0]; column < last[0]; column++) {
            const cell = options.cell(row, column);
            if (!cell) continue;
            const box = { x: head.w + column * w, y: head.h + row * h, w: w - gap, h: h - gap, item: row * columns + column, faded: cell.faded, centre: true, size: 11 };
            found.push({ ...box, fill: cell.fill, text: hasText && cell.text });
            if (cell.parts) {
              const sum = cell.parts.reduce((sum, [, part]) => sum + part, 0);
              let x = box.x;
              for (const [fill, part] of cell.parts) {
                found.push({ x, y: box.y, w: box.w * part / sum, h: box.h, fill, faded: cell.faded });
                x += box.w * part / sum;
              }
              const widest = cell.parts.reduce((most, part) => part[1] > most[1] ? part : most);
              found.push({ ...box, item: undefined, text: hasText && cell.over, ink: ink(widest[0]) });
            }
          }
        return found;
      },
      frame(context, left, top, plot) {
        const { w, h } = size(plot), text = colour("text"), dim = colour("dim"), back = colour("card");
        context.globalAlpha = 1;
        context.fillStyle = back;
        context.fillRect(0, 0, plot.viewWidth, head.h);
        context.fillRect(0, 0, head.w, plot.viewHeight);
        context.font = "400 12px system-ui, sans-serif";
        context.textBaseline = "middle";
        context.save();
        context.beginPath();
        context.rect(0, head.h, head.w, plot.viewHeight);
        context.clip();
        const step = Math.max(1, Math.ceil(13 / h));
        for (let row = Math.floor(top / h); row < rows && row * h < top + plot.viewHeight; row++) {
          if (row % step) continue;
          const label = options.rowHead(row);
          context.textAlign = "right";
          context.fillStyle = isFound(String(label)) || !query ? text : dim;
          context.fillText(fitted(context, String(label), head.w - 14, true), head.w - 9, head.h + (row + .5) * h - top - 1);
        }
        context.restore();
        context.save();
        context.beginPath();
        context.rect(head.w, 0, plot.viewWidth, head.h);
        context.clip();
        context.fillStyle = dim;
        const skip = Math.max(1, Math.ceil(13 / w));
        for (let column = Math.max(0, Math.floor(left / w)); column < columns && column * w < left + plot.viewWidth; column++) {
          if (column % skip) continue;
          const x = head.w + (column + .5) * w - left - 1, label = String(options.columnHead(column));
          if (options.flat) {
            context.textAlign = "center";
            context.fillText(fitted(context, label, w - 4), x, head.h / 2);
          } else {
            context.save();
            context.translate(x, head.h - 7);
            context.rotate(-Math.PI / 2);
            context.textAlign = "left";
            context.fillText(fitted(context, label, head.h - 14, true), 0, 0);
            context.restore();
          }
        }
        context.restore();
      },
    });
    return made;
  }
  // The space that the longest of some labels takes, up to a limit.
  const space = (labels, most) => Math.min(most, 22 + 6.8 * labels.reduce((longest, label) => Math.max(longest, String(label).length), 0));
  const short = name => name.replace(/:latest$/, "");
  // The width of a cell that every number of bytes fits.
  const NUMBER = 56;
  const panelled = () => el("div", { class: "panel", hidden: true, "aria-live": "polite" });

  // What models share

  VIEWS.sharing = {
    title: "Sharing",
    show(section) {
      const { models, shared, families } = DATA.sharing, count = models.length;
      section.append(...heading("Which bytes do models have in common?", "Each cell is what two models share, as a part of the smaller one. Models that share blobs stand together."));
      if (!count) return section.append(el("p", { class: "empty" }, "The store is empty: there is nothing to share."));
      const table = shared.map((runs, row) => {
        const values = new Float64Array(count - row);
        for (let at = 0, next = 0; at < runs.length; at += 2) { values.fill(runs[at + 1], next, next + runs[at]); next += runs[at]; }
        return values;
      });
      const of = (a, b) => a <= b ? table[a][b - a] : table[b][a - b];
      const part = (a, b) => of(a, b) / Math.max(1, Math.min(of(a, a), of(b, b)));
      const panel = panelled();
      const matrix = grid({
        label: "Matrix of the bytes that models share. The table below has the same numbers.",
        rows: count, columns: count, headWidth: space(models.map(short), 190), headHeight: space(models.map(short), count > 40 ? 90 : 120), wide: 110, high: 34, least: 11, leastText: NUMBER, square: count > 24,
        rowHead: row => short(models[row]), columnHead: column => short(models[column]),
        cell(row, column) {
          const found = isFound(models[row]) || isFound(models[column]);
          if (row === column) return { fill: colour("other"), text: bytes(of(row, row)), faded: !found };
          const value = part(row, column);
          return { fill: value ? ramp(.08 + .92 * value) : colour("none"), text: value ? bytes(of(row, column)) : "", faded: !found };
        },
        describe: (row, column) => row === column ? `${models[row]}\n${bytes(of(row, row))} on disk` :
          `${models[row]} and ${models[column]}\n${bytes(of(row, column))} in common: ${share(of(row, column), of(row, row))} of the first, ${share(of(row, column), of(column, column))} of the second`,
        open(row, column) {
          panel.hidden = false;
          panel.replaceChildren(el("h3", {}, row === column ? models[row] : `${models[row]} and ${models[column]}`), listed([
            [models[row], bytes(of(row, row))], row !== column && [models[column], bytes(of(column, column))],
            row !== column && ["in common", `${bytes(of(row, column))}, ${share(of(row, column), of(row, row))} of the first, ${share(of(row, column), of(column, column))} of the second`]]));
        },
      });
      section.append(el("div", { class: "tools" }, el("h3", {}, "Models by models"), matrix.buttons), matrix.box, ramped("0 %", "100 %", "in common"), hint(), panel,
        behind("Bytes that two models share", ["Model", "With", "#In common", "#Of the first", "#Of the second"], () => {
          const found = [];
          for (let a = 0; a < count; a++) for (let b = a + 1; b < count; b++)
            if (of(a, b) && (isFound(models[a]) || isFound(models[b]))) found.push([models[a], models[b], bytes(of(a, b)), share(of(a, b), of(a, a)), share(of(a, b), of(b, b))]);
          return found;
        }));
      if (!families.length) return;
      const holder = el("div"), detail = panelled();
      const show = at => {
        const family = families[at], kinds = ["shared", "cold", "unique"];
        const texts = ["shared in the family", "stored as differences", "its own"];
        detail.hidden = true;
        const layers = grid({
          label: "Layers of a family of models. The table below has the same numbers.",
          rows: family.models.length, columns: family.columns.length, headWidth: space(family.models.map(short), 190), headHeight: 34, flat: true, wide: 130, high: 30, least: 26, leastText: NUMBER,
          rowHead: row => short(family.models[row]), columnHead: column => family.columns[column],
          cell(row, column) {
            const cell = family.cells[row][column];
            if (!cell) return null;
            const sum = cell[0] + cell[1] + cell[2];
            return { parts: cell.map((part, kind) => [colour(kinds[kind]), part]).filter(([, part]) => part), over: cell[1] + cell[2] > .01 * sum ? bytes(cell[1] + cell[2]) : "", faded: !isFound(family.models[row]) };
          },
          describe: (row, column) => [`${family.models[row]}, ${family.stacks[column]} ${family.columns[column]}`, ...(family.cells[row][column] || []).map((part, kind) => `${bytes(part)} ${texts[kind]}`)].join("\n"),
          open(row, column) {
            detail.hidden = false;
            detail.replaceChildren(el("h3", {}, `${family.models[row]}, ${family.stacks[column]} ${family.columns[column]}`), listed((family.cells[row][column] || []).map((part, kind) => [texts[kind], bytes(part)])), el("p", {}, DATA.model[family.models[row]] ? modelLink(family.models[row]) : ""));
          },
        });
        holder.replaceChildren(layers.box, legend(kinds.map((kind, at) => [kind, texts[at]])), detail,
          behind("Bytes of each layer", ["Model", "Layers", "#Layer", "#Shared", "#As differences", "#Own"], () => family.models.flatMap((name, row) => family.cells[row].map((cell, column) => cell && [name, family.stacks[column], family.columns[column], ...cell.map(bytes)]).filter(Boolean))));
        redraw();
      };
      const select = el("select", { "aria-label": "Family", onchange: () => show(select.selectedIndex) }, ...families.map(family => el("option", {}, `${short(family.models[0])} and ${plural(family.models.length - 1, "other")}`)));
      section.append(el("h3", {}, "A family by layers"), el("p", { class: "lead" }, "What training or quantization left alone is shared. The numbers are bytes that a layer takes beyond that."), el("div", { class: "tools" }, select), holder);
      show(0);
    },
  };

  // Which model descends from which

  const SVG = "http://www.w3.org/2000/svg";
  function svg(tag, attributes, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) if (key.startsWith("on")) made.addEventListener(key.slice(2), value); else made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  VIEWS.family = {
    title: "Family",
    show(section) {
      const { nodes, rows, alone } = DATA.family;
      section.append(...heading("Which model descends from which?", "From base models to fine-tunes and quantizations: as their sources say, else their model cards, else equal weights and the order of import. The number on an edge is what the model adds on disk to its base."));
      if (!nodes.length) return section.append(el("p", { class: "empty" }, "No model of the store names another as its base, was quantized from it, or has weights of it."));
      const panel = panelled(), W = 250, H = 50, places = new Map(nodes.map((node, at) => [node.name, at]));
      const depth = nodes.reduce((most, node) => Math.max(most, node.depth), 0);
      const sides = nodes.filter(node => node.against && places.has(node.against[0]));
      // Where a tree does not fit, it is a list with indents. Dashed lines need room to the right.
      const room = sides.length ? 44 : 0, free = () => section.clientWidth - W - room - 4;
      const isTooWide = () => free() < depth * 340, isNarrow = isTooWide();
      addEventListener("resize", () => { if (!printing && isTooWide() !== isNarrow) route(); }, { signal: listening.signal });
      const DX = isNarrow ? 24 : Math.min(400, free() / Math.max(1, depth)), DY = isNarrow ? 60 : 66;
      const width = depth * DX + W + room + 4, height = rows * DY;
      const picture = svg("svg", { class: "tree", viewBox: `-2 -2 ${width} ${height}`, width, height, role: "group", "aria-label": "Trees of models. The table below has the same facts." });
      const against = node => `${bytes(node.against[1])} of ${node.name} are compressed against ${node.against[0]}`;
      const added = node => node.relation ? node.delta + node.own : 0;
      const text = node => [node.relation, `${bytes(node.shared)} shared`, node.delta ? `${bytes(node.delta)} as differences` : "", `${bytes(node.own)} its own`].filter(Boolean).join(", ");
      // Lines between models of which one is compressed against the other: no descent.
      for (const node of sides) {
        const other = nodes[places.get(node.against[0])], [left, right] = node.depth <= other.depth ? [node, other] : [other, node];
        const x = left.depth * DX + W, y = left.row * DY + H * .7, end = right.row * DY + H * .7;
        const isBeside = !isNarrow && left.depth < right.depth, to = right.depth * DX + (isBeside ? 0 : W), out = isBeside ? (to - x) * .5 : Math.max(x, to) - x + room;
        picture.append(svg("path", { class: "side", d: isBeside ? `M${x} ${y} C${x + out} ${y} ${to - out} ${end} ${to} ${end}` : `M${x} ${y} C${x + out} ${y} ${x + out} ${end} ${to} ${end}` },
          svg("title", {}, against(node))));
      }
      for (const node of nodes) {
        const x = node.depth * DX, y = node.row * DY;
        if (node.above >= 0) {
          const above = nodes[node.above], ax = above.depth * DX + W, ay = above.row * DY + H / 2;
          const thick = above.outside ? 1 : 1 + 3 * Math.sqrt(added(node) / Math.max(1, node.size));
          picture.append(svg("path", { d: isNarrow ? `M${ax - W + 12} ${ay + H / 2} V${y + H / 2} H${x}` : `M${ax} ${ay} C${ax + 45} ${ay} ${ax + 15} ${y + H / 2} ${ax + 60} ${y + H / 2} H${x}`, "stroke-width": thick.toFixed(1) }));
          if (!isNarrow) picture.append(svg("text", { class: "dim edge", x: x - 8, y: y + H / 2 - 6, "text-anchor": "end" }, above.outside ? "" : `+${bytes(added(node))}`));
        }
        const open = () => {
          panel.hidden = false;
          panel.replaceChildren(el("h3", {}, node.name), node.outside ? el("p", {}, "The store has no model of this name; others name it as their base.") : listed([
            ["on disk", bytes(node.size)], node.relation && ["relation", `${node.relation} ${nodes[node.above].name}`], node.relation && ["evidence", node.evidence],
            node.relation && ["shared with it", bytes(node.shared)], node.relation && ["stored as differences", bytes(node.delta)], node.relation && ["its own", bytes(node.own)],
            node.against && ["compressed against", `${node.against[0]}, ${bytes(node.against[1])}: how it is stored, not where it comes from`]]),
            el("p", {}, DATA.model[node.name] ? modelLink(node.name) : ""));
        };
        const label = `${node.name}: ${node.outside ? "not in the store" : [bytes(node.size), node.relation ? text(node) : "base", node.against && `compressed against ${node.against[0]}`].filter(Boolean).join(", ")}`;
        const group = svg("g", { class: node.outside ? "outside" : "", tabindex: 0, role: "button", "aria-label": label, transform: `translate(${x} ${y})`, onclick: open,
          onkeydown: event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } } },
          svg("rect", { width: W, height: H, rx: 7 }),
          svg("text", { x: 12, y: 20 }, short(node.name).length > 34 ? short(node.name).slice(0, 33) + "\u2026" : short(node.name)),
          svg("text", { class: "dim", x: 12, y: 37 }, node.outside ? "not in the store" : `${bytes(node.size)}${!node.relation ? "" : isNarrow && !nodes[node.above].outside ? `, +${bytes(added(node))}` : ", " + node.relation.split(" ")[0]}`));
        if (node.relation && node.size && !nodes[node.above].outside) {
          let at = 150;
          for (const [kind, part] of [["shared", node.shared], ["cold", node.delta], ["unique", node.own]]) {
            const w = 88 * part / node.size;
            const bar = svg("rect", { x: at, y: 31, width: w.toFixed(1), height: 7 });
            bar.style.fill = `var(--${kind})`;
            bar.style.stroke = "none";
            group.append(bar);
            at += w;
          }
        }
        group.dataset.name = node.name;
        picture.append(group);
      }
      const fade = () => picture.querySelectorAll("g").forEach(group => group.classList.toggle("faded", !isFound(group.dataset.name)));
      document.addEventListener("searched", fade, { signal: listening.signal });
      fade();
      let zoom = 1;
      const scale = factor => { zoom = Math.max(.3, Math.min(3, zoom * factor)); picture.setAttribute("width", width * zoom); picture.setAttribute("height", height * zoom); };
      const button = (name, sign, factor) => el("button", { type: "button", "aria-label": name, onclick: () => scale(factor) }, sign);
      section.append(el("div", { class: "tools" }, el("span", { class: "group push" }, button("Zoom out", "\u2212", .8), button("Zoom in", "+", 1.25))),
        el("div", { class: "wide whole", tabindex: 0 }, picture), legend([["shared", "shared with its base"], ["cold", "stored as differences to it"], ["unique", "its own"]]), panel);
      if (sides.length) section.append(el("p", { class: "hint" }, "A dashed line joins models of which one is compressed against the other. It says how they are stored, not which descends from which."));
      if (alone) section.append(el("p", { class: "hint" }, `${plural(alone, "model")} without relatives: not shown.`));
      section.append(behind("Models and their bases", ["Model", "Relation", "Base", "#On disk", "#Shared", "#As differences", "#Own", "Compressed against", "Evidence"],
        () => nodes.filter(node => isFound(node.name)).map(node => [node.name, node.relation || (node.outside ? "not in the store" : "base"), node.above >= 0 ? nodes[node.above].name : "", bytes(node.size), ...(node.relation ? [bytes(node.shared), bytes(node.delta), bytes(node.own)] : ["", "", ""]), node.against ? node.against[0] : "", node.evidence || ""])));
    },
  };

  // A model

  function bars(histogram, label, name) {
    const [low, high, counts] = histogram, top = Math.max(...counts), W = 480, H = 96;
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H + 18}`, role: "img", "aria-label": `${label}: from ${digits(low)} to ${digits(high)}` });
    counts.forEach((count, at) => {
      const h = count ? Math.max(1, H * count / top) : 0, w = W / counts.length;
      const bar = svg("rect", { x: (at * w + .5).toFixed(1), y: (H - h).toFixed(1), width: (w - 1).toFixed(1), height: h.toFixed(1) }, svg("title", {}, `${digits(low + (high - low) * at / counts.length)} to ${digits(low + (high - low) * (at + 1) / counts.length)}: ${number(count)}`));
      bar.style.fill = `var(--${name})`;
      picture.append(bar);
    });
    for (const [x, anchor, value] of [[0, "start", low], [W, "end", high]]) {
      const mark = svg("text", { x, y: H + 14, "text-anchor": anchor, "font-size": 11 }, digits(value));
      mark.style.fill = "var(--dim)";
      picture.append(mark);
    }
    return [el("h3", {}, label), picture];
  }
  const COLOURINGS = ["type", "bits", "bytes", "sharing", "error"];
  let colouring = "type";
  VIEWS.model = {
    title: "Model",
    show(section, address) {
      // The address is the name of a model, and what colours mean if it ends with that.
      const end = address.slice(address.lastIndexOf("/") + 1), isEnd = address.includes("/") && COLOURINGS.includes(end);
      if (isEnd) colouring = end;
      const wanted = isEnd ? address.slice(0, address.lastIndexOf("/")) : address;
      const names = Object.keys(DATA.model), chosen = DATA.model[wanted] ? wanted : names[0];
      section.append(...heading(DATA.store ? "What is a model made of?" : "Where do the models differ?", "Each cell is a tensor of a layer, or the same tensor of all experts, of which the worst error counts. A click shows it."));
      if (!chosen) return section.append(el("p", { class: "empty" }, "The page describes no single model. Name models: \u201cblobstore page NAME OUT.html\u201d."));
      const select = el("select", { "aria-label": "Model", onchange: () => { location.hash = "model/" + encodeURIComponent(select.value); } }, ...names.map(name => el("option", { value: name, selected: name === chosen }, name)));
      const model = DATA.model[chosen];
      if (model.error) return section.append(el("div", { class: "tools" }, select), el("p", { class: "alarm" }, model.error));
      const { rows, stacks, columns, cells, types, tensors, measured } = model;
      const every = DATA.store ? DATA.store.models : [], compared = model.compared, panel = panelled(), keys = el("div");
      const isMeasured = Object.keys(measured).length > 0;
      // The error of a tensor: infinite if elements of it cannot be compared, null if it was not measured.
      const errorOf = at => { const found = measured[at]; return !found ? null : found.nonfinite ? Infinity : real(found.relative_error); };
      const errors = Object.keys(measured).map(errorOf).filter(value => value > 0 && Number.isFinite(value));
      const hasErrors = Object.keys(measured).some(at => errorOf(at) !== null);
      const modes = [["type", "Type"], ["bits", "Bits per weight"], ["bytes", "Bytes"], ...(DATA.store ? [["sharing", "Sharing"]] : []), ...(hasErrors ? [["error", "Error or change"]] : [])];
      if (!modes.some(([mode]) => mode === colouring)) colouring = "type";
      const bits = tensors.map(tensor => tensor[4]).filter(value => value !== null);
      const sizes = cells.map(([, , first, count]) => tensors.slice(first, first + count).reduce((sum, tensor) => sum + tensor[3], 0));
      const most = values => values.reduce((most, value) => Math.max(most, value), 0), least = values => values.reduce((least, value) => Math.min(least, value), Infinity);
      // A range of at least a factor of 2, so that small differences do not look large.
      const spare = errors.length ? Math.max(0, Math.LN2 - Math.log(most(errors) / least(errors))) / 2 : 0;
      const scales = {
        bits: [0, Math.max(most(bits), 1)], bytes: [Math.log(Math.max(1, least(sizes))), Math.log(Math.max(2, most(sizes)))],
        error: errors.length ? [Math.log(least(errors)) - spare, Math.log(most(errors)) + spare] : [0, 1],
      };
      const within = (mode, value) => { const [low, high] = scales[mode]; return high > low ? (value - low) / (high - low) : 1; };
      // The tensor of a cell with the largest error.
      const worst = (first, count) => {
        let found = first;
        for (let at = first + 1; at < first + count; at++) if ((errorOf(at) ?? -1) > (errorOf(found) ?? -1)) found = at;
        return found;
      };
      const told = at => {
        const found = measured[at] || {}, value = errorOf(at);
        return found.nonfinite ? `${plural(found.nonfinite, "element")} that differ and are not finite` : value === null ? "" : value ? `relative error or change ${digits(value)}, SNR ${decibels(found.snr_db)}` : `equal to ${model.base}`;
      };
      const others = tensor => model.owners[tensor[6]].filter(at => at !== model.place);
      const painted = at => {
        const [, , first, count] = cells[at], tensor = tensors[first], plain = colour("none");
        if (colouring === "type") return { fill: colour("c" + tensor[1] % 8), text: types[tensor[1]] + (count > 1 ? ` \u00d7${count}` : "") };
        if (colouring === "bits") return { fill: tensor[4] === null ? plain : ramp(within("bits", tensor[4])), text: digits(tensor[4]) };
        if (colouring === "bytes") return { fill: ramp(within("bytes", Math.log(Math.max(1, sizes[at])))), text: bytes(sizes[at]) };
        if (colouring === "sharing") { const found = others(tensor).length; return { fill: colour(found ? "shared" : "unique"), text: found ? `${found > 50 ? "50+" : found}` : "" }; }
        const found = worst(first, count), value = errorOf(found);
        if (value === Infinity) return { fill: colour("fault"), text: measured[found].nonfinite ? "not finite" : digits(value) };
        return value === null ? { fill: plain, text: "" } : value ? { fill: ramp(within("error", Math.log(value))), text: digits(value) } : { fill: colour("same"), text: "=" };
      };
      const by = new Map(cells.map(([row, column], at) => [row * Math.max(1, columns.length) + column, at]));
      const width = Math.max(1, columns.length);
      const isShown = at => { const [, , first, count] = cells[at]; if (!query) return true; for (let i = first; i < first + count; i++) if (isFound(tensors[i][0])) return true; return false; };
      const describe = at => {
        const [, , first, count] = cells[at], found = worst(first, count), tensor = tensors[found];
        return [tensor[0] + (count > 1 ? ` and ${plural(count - 1, "other")}` : ""), `${types[tensor[1]]}, [${tensor[2].join(", ")}], ${bytes(sizes[at])}, ${digits(tensor[4])} bits per weight`, told(found)].filter(Boolean).join("\n");
      };
      const group = ([value, row, column]) => `${digits(value)} at row ${number(row)}, column ${number(column)}`;
      const opened = index => {
        const tensor = tensors[index], found = measured[index] || {}, also = others(tensor);
        return [el("h3", {}, tensor[0]), listed([["type", types[tensor[1]] + (found.base_type ? `; ${found.base_type} in the base` : "")], ["shape", `[${tensor[2].join(", ")}]`], ["size", bytes(tensor[3])], ["bits per weight", digits(tensor[4])], tensor[5] && ["blob", el("code", {}, tensor[5])],
          errorOf(index) !== null && [`error against ${model.base}`, told(index)],
          found.max_abs_error && ["largest error", digits(found.max_abs_error)],
          found.worst && ["worst group", group(found.worst)],
          tensor[5] && ["also in", also.length ? el("span", {}, ...also.slice(0, 12).flatMap((place, i) => [i ? ", " : "", DATA.model[every[place].name] ? modelLink(every[place].name) : every[place].name]), also.length > 12 ? ` and ${also.length - 12} more` : "") : "no other model"]]),
          ...(found.values ? bars(found.values, "Values", "c0") : []), ...(found.errors ? bars(found.errors, "Differences to the base", "own") : [])];
      };
      const map = grid({
        label: `Tensors of ${chosen}. The table below has the same facts.`, rows: rows.length, columns: width, headWidth: space(rows.map((row, at) => `${stacks[at]} ${row}`), 210), headHeight: columns.length ? space(columns.map(name => name.replace(/\.weight$/, "")), Math.max(90, Math.min(210, innerHeight * .2))) : 8,
        wide: 92, high: 24, least: 22,
        rowHead: row => stacks[row] ? (width > 1 && stacks[row] === stacks[row - 1] ? rows[row] : `${stacks[row]} ${rows[row]}`) : rows[row], columnHead: column => columns[column] ? columns[column].replace(/\.weight$/, "") : "",
        cell(row, column) { const at = by.get(row * width + column); return at === undefined ? null : { ...painted(at), faded: !isShown(at) }; },
        describe: (row, column) => describe(by.get(row * width + column)),
        open(row, column) {
          const [, , first, count] = cells[by.get(row * width + column)];
          panel.hidden = false;
          const shown = colouring === "error" ? worst(first, count) : first;
          const body = el("div", {}, ...opened(shown));
          panel.replaceChildren(body);
          if (count > 1) {
            const pick = el("select", { "aria-label": "Tensor", onchange: () => body.replaceChildren(...opened(first + pick.selectedIndex)) }, ...tensors.slice(first, first + Math.min(count, 2000)).map((tensor, at) => el("option", { selected: first + at === shown }, tensor[0])));
            panel.prepend(el("div", { class: "tools" }, pick));
          }
        },
      });
      const key = () => {
        if (colouring === "type") keys.replaceChildren(legend(types.map((type, at) => ["c" + at % 8, type])));
        else if (colouring === "bits") keys.replaceChildren(ramped("0", digits(scales.bits[1]), "bits per weight"));
        else if (colouring === "bytes") keys.replaceChildren(ramped(bytes(Math.round(Math.exp(scales.bytes[0]))), bytes(Math.round(Math.exp(scales.bytes[1]))), "bytes, logarithmic"));
        else if (colouring === "sharing") keys.replaceChildren(legend([["shared", "in other models too; the number of them"], ["unique", "in no other model"]]));
        else if (errors.length) keys.replaceChildren(ramped(digits(Math.exp(scales.error[0])), digits(Math.exp(scales.error[1])), `norm of the difference to ${model.base}, divided by the norm of the base, logarithmic`));
        else keys.replaceChildren(legend([["same", "equal to " + model.base]]));
      };
      key();
      section.append(el("div", { class: "tools" }, compared ? "" : select, choice(modes, colouring, value => { colouring = value; key(); map.draw(); }, "Colours"), map.buttons),
        el("p", { class: "printed" }, chosen),
        facts(compared ? [
          ["tensors", number(tensors.length)], ["differ", number(compared.differing)], ["relative error", digits(compared.relative_error)], ["SNR", decibels(compared.snr_db)],
          ["largest error", digits(compared.max_abs_error)], ["bits per weight", digits(compared.bits_per_weight)], ["in the base", digits(compared.base_bits_per_weight)],
        ] : [["architecture", model.architecture || "unknown"], ["parameters", model.parameters === null ? "unknown" : digits(model.parameters / 1e6) + " M"], ["tensors", number(tensors.length)], ["size", bytes(model.size)], ...(model.base ? [["base", model.base]] : []), ...(model.signed ? [["signed by", model.signed]] : [])]));
      if (!tensors.length) return section.append(el("p", { class: "empty" }, "The model has no tensors that can be read."));
      section.append(map.box, keys, hint(), panel);
      if (compared) {
        if (compared.nonfinite) section.append(el("p", { class: "alarm" }, `${plural(compared.nonfinite, "element")} that differ and are not finite in one of the models; no error includes them.`));
        for (const [owner, count, found] of compared.only)
          section.append(el("details", {}, el("summary", {}, `${plural(count, "tensor")} only in ${owner}`), el("ul", {}, ...found.map(name => el("li", {}, name)), count > found.length ? el("li", {}, `and ${number(count - found.length)} more`) : null)));
      } else if (!isMeasured && DATA.live) {
        const button = el("button", { type: "button", onclick: async () => {
          button.disabled = true;
          button.textContent = "Reading the weights\u2026";
          const found = await (await fetch("measure?model=" + encodeURIComponent(chosen), { method: "POST" })).json().catch(() => ({ error: "the server has ended" }));
          if (found.error) button.textContent = found.error; else { DATA.model[chosen] = found; route(); }
        } }, "Measure values and errors");
        section.append(el("p", {}, button));
      } else if (!isMeasured) section.append(el("p", { class: "hint" }, "\u201cblobstore page --measure\u201d adds histograms of the values and errors against the base."));
      for (const fault of model.faults) section.append(el("p", { class: "alarm" }, fault));
      // The worst first, if there are errors.
      const order = tensors.map((_, at) => at);
      if (hasErrors) order.sort((a, b) => (errorOf(b) ?? -1) - (errorOf(a) ?? -1) || a - b);
      const errorHeads = hasErrors ? ["#Error or change", "#SNR", "#Largest error", "#Not finite", "Worst group"] : [], blobHeads = compared ? [] : ["Blob", "#Other models"];
      section.append(behind(`Tensors of ${chosen}`, ["Tensor", "Type", "Shape", "#Size", "#Bits", ...blobHeads, ...errorHeads], () => order.filter(at => isFound(tensors[at][0])).map(at => {
        const tensor = tensors[at], found = measured[at] || {};
        return [tensor[0], types[tensor[1]] + (found.base_type ? ` (${found.base_type})` : ""), `[${tensor[2].join(", ")}]`, bytes(tensor[3]), digits(tensor[4]), ...(compared ? [] : [tensor[5], number(others(tensor).length)]),
          ...(hasErrors ? [digits(found.relative_error), found.snr_db === undefined ? "" : decibels(found.snr_db), found.max_abs_error ? digits(found.max_abs_error) : "", found.nonfinite ? number(found.nonfinite) : "", found.worst ? group(found.worst) : ""] : [])];
      })));
    },
  };

  // Health

  VIEWS.health = {
    title: "Health",
    show(section) {
      const { models, gc, blobs, cold, verified, last_verified, quarantine, now } = DATA.health;
      const damaged = models.filter(model => model.error || model.faults.length);
      const REASONS = { young: "written in the last hour" }, kept = Object.entries(gc.kept || {}).map(([reason, size]) => [bytes(size), REASONS[reason] || reason]);
      const why = kept.filter(([, reason]) => reason !== "base").map(([size, reason]) => `${size} of garbage stays: ${reason}`).join(", ");
      // What the sizes and manifests say, and how much of the content was looked at.
      const state = model => model.error ? "unreadable" : model.faults.length ? plural(model.faults.length, "fault") : model.verified >= model.blobs - model.cold ? "ok" : model.verified ? "ok, partly verified" : "ok, not verified";
      const age = seconds => { const days = (now - seconds) / 86400; return days < 1 ? "today" : days < 2 ? "yesterday" : `${Math.floor(days)} days ago`; };
      section.append(...heading("Is everything intact?", "Sizes and manifests are checked whenever the page is written. \u201cblobstore verify\u201d hashes the blobs; a blob counts as verified until its file changes. Compressed blobs have checksums of their own, which every reader checks; they are not counted."));
      section.append(facts([["verified", blobs ? `${number(verified)} of ${plural(blobs, "blob")}` : "nothing to verify"], ...(cold ? [["compressed", plural(cold, "blob")]] : []), ["last verified", last_verified ? age(last_verified) : "never"], ["damaged models", number(damaged.length)], ["files in quarantine", number(quarantine)], [why ? `gc would free now; ${why}` : "gc would free", gc.error ? "unknown" : bytes(gc.size)]]));
      for (const model of damaged.slice(0, 50)) section.append(el("p", { class: "alarm" }, `${model.name}: ${model.error || model.faults[0]}`));
      if (!models.length) section.append(el("p", { class: "empty" }, "The store is empty."));
      const isDamaged = model => Boolean(model.error || model.faults.length);
      const written = model => model.modified ? age(model.modified) : "unknown";
      const hashed = model => model.error ? "" : `${number(model.verified)} of ${number(model.blobs - model.cold)}`;
      const sorted = [...models].sort((a, b) => isDamaged(b) - isDamaged(a) || a.modified - b.modified);
      const body = el("tbody"), rest = el("p", { class: "hint" });
      // Many models of one state that is no fault are one row.
      const row = group => {
        const [model] = group, single = group.length === 1, name = single ? model.name : plural(group.length, "model");
        const sum = key => group.reduce((total, each) => total + each[key], 0), hot = sum("blobs") - sum("cold");
        const times = [...new Set([group.at(-1), model].map(written))];
        return el("tr", {}, el("th", { scope: "row", title: name }, name), el("td", { class: isDamaged(model) ? "alarm" : "" }, state(model)), el("td", {}, times.join(" to ").replace(" days ago to", " to")),
          el("td", {}, el("span", { class: "meter" }, el("i", { width: `${hot ? 100 * sum("verified") / hot : 0}%` }))), el("td", { class: "n" }, single ? hashed(model) : ""), el("td", { class: "n" }, single ? number(model.cold) : ""));
      };
      const fill = () => {
        const found = sorted.filter(model => isFound(model.name)), groups = new Map();
        for (const model of found) {
          const key = query || found.length <= 15 || isDamaged(model) ? model.name : state(model);
          groups.set(key, [...groups.get(key) || [], model]);
        }
        body.replaceChildren(...[...groups.values()].slice(0, 300).map(row));
        rest.textContent = groups.size > 300 ? `and ${number(groups.size - 300)} more; search for a name to see them` : groups.size < found.length ? "Search for a name to see its model." : "";
      };
      if (models.length) {
        fill();
        document.addEventListener("searched", fill, { signal: listening.signal });
        section.append(el("div", { class: "wide whole brief", tabindex: 0 }, el("table", {}, el("caption", {}, "Models, damaged ones first, then the oldest"), el("thead", {}, el("tr", {}, ...["Model", "State", "Written", "Verified", "#Blobs", "#Compressed"].map(head => el("th", { scope: "col", class: head.startsWith("#") ? "n" : "" }, head.replace("#", ""))))), body)), rest);
        if (models.length > 15) section.append(behind("All models", ["Model", "State", "Written", "#Verified", "#Compressed"], () => sorted.map(model => [model.name, state(model), written(model), hashed(model), number(model.cold)])));
      }
      section.append(el("h3", {}, "What gc would remove"));
      if (gc.error) return section.append(el("p", { class: "alarm" }, gc.error));
      section.append(el("p", { class: "lead" }, gc.files ? `${plural(gc.files, "file")}, ${bytes(gc.size)}.` : kept.length ? "Nothing now." : "Nothing."));
      if (gc.refusal) section.append(el("p", { class: "alarm" }, gc.refusal));
      if (kept.length) section.append(el("p", { class: "lead" }, "It keeps, although no model needs them: " + kept.map(([size, reason]) => `${size} (${reason})`).join(", ") + "."));
      if (gc.largest.length) section.append(behind("The largest files that gc would remove", ["File", "#Size"], () => gc.largest.map(([path, size]) => [path, bytes(size)])));
    },
  };

  // The frame

  const names = Object.keys(VIEWS).filter(name => DATA[name]);
  const tabs = el("nav", { "aria-label": "Views" }, ...names.map(name => el("a", { href: "#" + name }, VIEWS[name].title)));
  const search = el("input", { type: "search", placeholder: "Search names", "aria-label": "Search names of models and tensors" });
  const main = el("main");
  function route() {
    listening.abort();
    listening = new AbortController();
    const [name, ...rest] = (location.hash.slice(1) || DATA.start || "").split("/");
    const view = names.includes(name) ? name : names[0];
    tabs.querySelectorAll("a").forEach((tab, at) => names[at] === view ? tab.setAttribute("aria-current", "page") : tab.removeAttribute("aria-current"));
    const section = el("section", { id: "view-" + view });
    tip.hidden = true;
    main.replaceChildren(section);
    let argument = rest.join("/");
    try { argument = decodeURIComponent(argument); } catch { /* someone typed it */ }
    VIEWS[view].show(section, argument);
    if (DATA.rest?.models) section.append(
      el("p", { class: "hint" }, `The page describes the largest models, and not ${plural(DATA.rest.models, "smaller one")}.`),
      behind("The other models", ["Repository", "#Models", "#On disk", "#Freed by the removal of one"],
        () => DATA.rest.repositories.map(([name, count, size, unique]) => [name, number(count), bytes(size), bytes(unique)])));
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
  addEventListener("resize", redraw);
  addEventListener("beforeprint", () => { printing = true; redraw(); });
  addEventListener("afterprint", () => { printing = false; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // A page that comes from "blobstore page --serve" follows the store.
  const live = el("p", { class: "live", role: "status", hidden: !DATA.live }), asOf = el("p");
  function tell() {
    asOf.textContent = DATA.written ? `blobstore, as of ${date(DATA.written)} UTC` : "blobstore compare";
    if (!DATA.live) return;
    const { work, unfinished } = DATA.live;
    live.textContent = work.length ? `${plural(work.length, "process")} at work: ${work.map(item => `${item.process} uses ${plural(item.blobs, "blob")}`).join(", ")}${unfinished ? `, ${bytes(unfinished)} unfinished` : ""}` : "live, no work running";
  }
  async function follow() {
    try {
      const found = await (await fetch("state")).json();
      if (!found.error) {
        if (found.stamp !== DATA.live.stamp) {
          const fresh = await (await fetch("data")).json();
          if (!fresh.error) {
            for (const [name, model] of Object.entries(DATA.model)) if (fresh.model[name] && Object.keys(model.measured || {}).length && model.id === fresh.model[name].id) fresh.model[name] = { ...fresh.model[name], measured: model.measured };
            DATA = fresh;
            const top = scrollY;
            route();
            scrollTo(0, top);
          }
        }
        DATA.live = found;
        tell();
      }
    } catch { live.textContent = "the server has ended"; }
    setTimeout(follow, 2000);
  }
  document.body.append(
    el("header", {}, el("h1", {}, DATA.root), asOf, live),
    el("div", { class: "bar" }, names.length > 1 ? tabs : el("span", { class: "fill" }), search), main, tip, said);
  tell();
  route();
  if (DATA.live) setTimeout(follow, 2000);
})();
