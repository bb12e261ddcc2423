"""Style of the page: light or dark like the reader's system.

Surviving and lost steps can be distinguished without colours: lost steps are hatched or drawn as a dashed
line, and adjacent parts are separated by a gap. The pointer shows the name of a part; the tables have all
names.
"""

STYLE = """
:root { color-scheme: light dark;
  --page: #f4f6f8; --card: #fff; --ink: #1b2430; --soft: #5a6675; --line: #dde3e9; --faint: #eef1f4;
  --good: #1d7f50; --warn: #a96700; --bad: #c22f2f; --plain: #7b8794;
  --group-start: #56b4e9; --restore: #0072b2; --startup: #f0b400; --productive: #009e73; --stalls: #cc79a7;
  --lost: #d55e00; --p1: #cfc8ea; --p2: #8f83cf; --p3: #4f4299;
  --down: #98a3af; --nothing: #7a5230; --past: #b9c2cb; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12171d; --card: #1b222b; --ink: #e6ebf0; --soft: #9aa7b5; --line: #323c48; --faint: #242d38;
  --good: #4cc38a; --warn: #e2a53c; --bad: #f2726b; --plain: #7b8794;
  --group-start: #7cc7f2; --restore: #2a8fd0; --startup: #f2c14e; --productive: #2bb98f; --stalls: #d795bc;
  --lost: #ea7a2b; --p1: #453c78; --p2: #7a6dc4; --p3: #b8aef0;
  --down: #616d7a; --nothing: #a57c58; --past: #4c5866; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 18px 0 6px; color: var(--soft); font-weight: 600; }
p { margin: 6px 0; }
.soft { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 18px;
  margin-top: 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 12px;
  margin-top: 14px; padding: 0; background: none; border: 0; }
.card { background: var(--card); border: 1px solid var(--line); border-left: 5px solid var(--plain);
  border-radius: 8px; padding: 11px 14px; }
.card.good { border-left-color: var(--good); } .card.warn { border-left-color: var(--warn); }
.card.bad { border-left-color: var(--bad); }
.card .title { color: var(--soft); font-size: 13px; }
.card .head { font-size: 20px; font-weight: 650; line-height: 1.3; overflow-wrap: anywhere; }
.card .sign { margin-right: 6px; }
.card.good .sign { color: var(--good); } .card.warn .sign, .card.warn .head { color: var(--warn); }
.card.bad .sign, .card.bad .head { color: var(--bad); }
.card p { margin: 3px 0 0; font-size: 13.5px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .wide table { min-width: 640px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; padding: 4px 12px 4px 0;
  border-bottom: 1px solid var(--line); vertical-align: bottom; }
td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--faint); vertical-align: top;
  overflow-wrap: break-word; }
th.num, td.num { text-align: right; white-space: nowrap; }
td.time { white-space: nowrap; overflow-wrap: normal; }
tr.newest td { font-weight: 650; } tr.past td { color: var(--soft); }
tr.failed td:first-child { color: var(--bad); }
.badge { display: inline-block; padding: 0 7px; border-radius: 9px; font-size: 12px; border: 1px solid; }
.badge.durable { color: var(--good); } .badge.replicated { color: var(--p3); }
.badge.local { color: var(--warn); } .badge.lost { color: var(--bad); } .badge.past { color: var(--soft); }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft);
  margin: 6px 0 0; padding: 0; list-style: none; }
svg { display: block; width: 100%; height: auto; } .wide svg { min-width: 960px; }
svg text { font-size: 11.5px; fill: var(--soft); }
svg .lane-name { fill: var(--ink); } svg .note { font-size: 11.5px; } svg .bad { fill: var(--bad); }
.grid, .lane { stroke: var(--line); stroke-width: 1; } .lane { stroke-dasharray: 1 3; }
.c-group_start { fill: var(--group-start); background: var(--group-start); }
.c-restore { fill: var(--restore); background: var(--restore); }
.c-startup { fill: var(--startup); background: var(--startup); }
.c-productive { fill: var(--productive); background: var(--productive); }
.c-stalls { fill: var(--stalls); background: var(--stalls); }
.c-lost_steps { fill: var(--lost); background: var(--lost); }
.hatch { stroke: var(--card); stroke-width: 1.6; fill: none; pointer-events: none; }
.key.c-lost_steps { background: repeating-linear-gradient(135deg, var(--lost) 0 3px, var(--card) 3px 4.5px); }
.c-down { fill: var(--down); background: var(--down); }
.c-no_commit { fill: var(--nothing); background: var(--nothing); }
.c-open { fill: var(--faint); background: var(--faint); stroke: var(--line); border: 1px solid var(--line); }
.p1 { fill: var(--p1); background: var(--p1); } .p2 { fill: var(--p2); background: var(--p2); }
.p3 { fill: var(--p3); background: var(--p3); }
.steps { fill: none; stroke-width: 2; stroke-linejoin: round; } .steps.kept { stroke: var(--productive); }
.steps.gone { stroke: var(--lost); stroke-dasharray: 4 2; }
.back { stroke: var(--soft); stroke-dasharray: 2 3; fill: none; }
.fail-line { stroke: var(--bad); stroke-width: 1; opacity: .55; }
.cross { stroke: var(--bad); stroke-width: 2.4; fill: none; }
.m-live { fill: var(--ink); } .m-past { fill: var(--past); } .m-restore { fill: var(--restore); }
.m-verified, .m-passed, .m-pin { fill: var(--ink); }
.m-other { fill: var(--soft); }
ul.tree { list-style: none; margin: 0; padding: 0; font-size: 13.5px; }
ul.tree li { border-left: 2px solid var(--line); padding: 2px 0 2px 12px; }
ul.tree li.on { border-left-color: var(--productive); } ul.tree li.off { color: var(--soft); }
footer { color: var(--soft); font-size: 12.5px; margin-top: 16px; }
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""
