// Search where the site is opened as a file: browsers start no Worker from one, so the theme's runs in a hidden frame instead.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.appendChild(frame);
    const scope = frame.contentWindow;
    // What the worker posts comes out here, and what is posted to it waits until it listens.
    scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = frame.contentDocument.createElement("script");
    this.ready = new Promise((resolve) => (script.onload = resolve));
    script.src = url;
    frame.contentDocument.body.appendChild(script);
    this.scope = scope;
  }

  postMessage(data) {
    this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {}
}

if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = FrameWorker;
}
