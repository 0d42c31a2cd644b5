"use strict";
// A page that is opened as a file may start no worker, which the search of the theme is. There a frame without a picture
// takes its place: it runs the same script, and has the two functions that a worker has. The theme asks for this name.
class IFrameWorker extends EventTarget {
  constructor(address) {
    super();
    const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
    this.inside = frame.contentWindow;
    addEventListener("message", (event) => {
      if (event.source === this.inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
    });
    const { document: page } = this.inside;
    page.open();
    page.write(`<script>
      const mother = parent;
      postMessage = (data) => mother.postMessage(data, "*");
      importScripts = (...names) => names.reduce((before, name) => before.then(() => new Promise((done, failed) => {
        const script = Object.assign(document.createElement("script"), { src: name, onload: done, onerror: failed });
        document.body.appendChild(script);
      })), Promise.resolve());
    </script><body><script src="${address}"></script></body>`);
    page.close();
  }

  postMessage(data) {
    const send = () => this.inside.dispatchEvent(new MessageEvent("message", { data }));
    if (this.inside.document.readyState === "complete") send();
    else this.inside.addEventListener("load", send, { once: true });
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
  // The theme asks for maps of the site, goes on without one, and may not read a file.
  const { open } = XMLHttpRequest.prototype;
  XMLHttpRequest.prototype.open = function opened(method, address, ...options) {
    const isMap = String(address).endsWith("/sitemap.xml");
    open.call(this, method, isMap ? "data:text/xml,<urlset/>" : address, ...options);
  };
}
