"""The page /docs: it shows the example of /openapi.json and sends it. It loads nothing from elsewhere."""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>fedabml</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
textarea, pre, input { font: 14px/1.4 ui-monospace, monospace; width: 100%; box-sizing: border-box }
pre { background: #f4f4f4; padding: .7rem; overflow: auto; white-space: pre-wrap }
td, th { text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top }
</style>
<h1>fedabml</h1>
<p id="about"></p>
<p><label>Token, if the service has one: <input id="token" type="password" autocomplete="off"></label>
<button id="load">Load the description</button></p>
<h2>Try it</h2>
<p><textarea id="body" rows="10" aria-label="Body of the request"></textarea>
<button id="send">POST /predict</button></p>
<pre id="answer" aria-live="polite"></pre>
<h2>The same in a shell</h2>
<pre id="curl"></pre>
<h2>Columns of a row</h2>
<table id="columns"></table>
<h2>Pages</h2>
<table id="paths"></table>
<p>The whole description, for other programs: <a href="openapi.json">openapi.json</a>.</p>
<script>
const at = id => document.getElementById(id);
const headers = more => ({...(at("token").value ? {authorization: "Bearer " + at("token").value} : {}), ...more});
const line = (table, ...cells) => {
  const row = table.insertRow();
  for (const cell of cells) row.insertCell().textContent = cell;
};
async function load() {
  const reply = await fetch("openapi.json", {headers: headers({})});
  const spec = await reply.json();
  if (!reply.ok) { at("about").textContent = spec.detail; return; }
  at("about").textContent = spec.info.description;
  const content = spec.paths["/predict"].post.requestBody.content["application/json"];
  at("body").value = JSON.stringify(content.example, null, 1);
  const quoted = JSON.stringify(content.example).replaceAll("'", "'\\\\''");
  const token = at("token").value ? ' -H "authorization: Bearer $FEDABML_TOKEN"' : "";
  at("curl").textContent =
    `curl ${new URL("predict", location)} -H 'content-type: application/json'${token} -d '${quoted}'`;
  at("columns").replaceChildren();
  at("paths").replaceChildren();
  const row = content.schema.properties.rows.items;
  for (const [name, kind] of Object.entries(row.properties || {}))
    line(at("columns"), name,
         kind.enum ? kind.enum.map(v => v === null ? "null" : v).join(", ") : (kind.format || "number") + ", null");
  if (!row.properties) line(at("columns"), "numbers", JSON.stringify(row));
  for (const [path, methods] of Object.entries(spec.paths))
    for (const [method, about] of Object.entries(methods)) line(at("paths"), method.toUpperCase(), path, about.summary);
}
async function send() {
  const more = {method: "POST", body: at("body").value, headers: headers({"content-type": "application/json"})};
  const reply = await fetch("predict", more);
  at("answer").textContent = reply.status + "\\n" + JSON.stringify(await reply.json(), null, 1);
}
at("load").onclick = load;
at("send").onclick = send;
load();
</script>
</html>
"""
