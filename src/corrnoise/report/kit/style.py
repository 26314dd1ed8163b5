"""The look of the page: one palette for light and dark, one layout for phone, desk and paper."""

from __future__ import annotations

from markupsafe import Markup

from corrnoise.report.kit.markup import tag

# Each colour on a light and on a dark background. Text and curves have a contrast of 4.5 on both.
PALETTE = {
    "ground": ("#f6f5f1", "#131519"),
    "card": ("#ffffff", "#1b1e24"),
    "ink": ("#1c2027", "#e9ebf0"),
    "muted": ("#575f6d", "#a5adbb"),
    "rule": ("#dedbd2", "#333944"),
    "grid": ("#eceae4", "#292e37"),
    "s0": ("#1b5cc0", "#82b4ff"),
    "s1": ("#a85300", "#ffb169"),
    "s2": ("#0d7458", "#5fd6b0"),
    "s3": ("#7d3cae", "#cfa4f7"),
    "s4": ("#b02439", "#ff97a3"),
    "s5": ("#636500", "#d3d162"),
    "minus": ("#1b5cc0", "#6aa5ff"),
    "plus": ("#d77a1e", "#f2a04f"),
    "sure": ("#0d6b4f", "#6ddcb6"),
    "sure-ground": ("#e2f3ec", "#16322a"),
}

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--ground);color:var(--ink);
 font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.page{max-width:1120px;margin:0 auto;padding:0 20px 56px}
a{color:var(--s0)}
:focus-visible{outline:2px solid var(--s0);outline-offset:2px;border-radius:3px}
h1,h2,h3{line-height:1.2;letter-spacing:-.015em;text-wrap:balance}
h1{font-size:clamp(1.5rem,.85rem + 3.1vw,2.8rem);margin:.3rem 0 .8rem;font-weight:680;
 overflow-wrap:anywhere}
h2{font-size:1.45rem;margin:0 0 .5rem;font-weight:650}
h3{font-size:1rem;margin:0 0 .2rem;font-weight:650}
p{margin:.4rem 0 .8rem;max-width:68ch}
.lead{font-size:1.1rem;color:var(--muted)}
.top{display:flex;justify-content:space-between;align-items:center;gap:16px;padding:18px 0 26px}
.brand{font-weight:680;letter-spacing:-.01em;display:flex;gap:10px;align-items:center}
.brand svg{width:30px;height:22px}
.theme{border:1px solid var(--rule);border-radius:999px;padding:2px;margin:0;display:flex;
 font-size:.8rem;background:var(--card)}
.theme legend{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.theme label{position:relative;cursor:pointer}
.theme input{position:absolute;opacity:0;inset:0;margin:0;cursor:pointer}
.theme span{display:block;padding:2px 10px;border-radius:999px;color:var(--muted)}
.theme input:checked+span{background:var(--ink);color:var(--card)}
.theme input:focus-visible+span{outline:2px solid var(--s0);outline-offset:1px}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:22px 0 0;padding:0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:14px 18px 15px;
 min-width:0;flex:1 1 150px}
.tile.wide{flex:1.5 1 190px}
.tile dt{color:var(--muted);font-size:.82rem;font-weight:550}
.tile dd{margin:0}
.tile .big{font-size:1.6rem;line-height:1.25;font-weight:680;letter-spacing:-.02em;
 font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile .note{color:var(--muted);font-size:.86rem;line-height:1.4}
.badge{display:inline-block;background:var(--sure-ground);color:var(--sure);border-radius:999px;
 padding:1px 10px;font-size:.82rem;font-weight:620}
section{padding-top:44px}
.grid{display:grid;gap:16px;grid-template-columns:minmax(0,1fr);margin-top:14px}
.mixed{align-items:start;column-gap:32px}
figure,.card{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:14px;
 padding:16px 18px;min-width:0}
.card.after{margin-top:16px}
.card h3{margin-bottom:8px}
.card>:first-child{margin-top:0}.card>:last-child{margin-bottom:0}
figcaption{font-size:.9rem;line-height:1.5;color:var(--muted);margin-top:8px}
figure h3{margin-bottom:8px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11px;fill:var(--muted);font-variant-numeric:tabular-nums}
svg text.name{font-weight:550}
svg text.label{font-weight:600;fill:var(--c,var(--muted))}
svg text.small{font-size:10.5px}
svg text.cell{fill:var(--ink);font-size:10.5px}
svg .gridline{stroke:var(--grid)}
svg .axis{stroke:var(--muted);stroke-opacity:.6}
svg .line{fill:none;stroke:var(--c);stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
svg .dashed{stroke-dasharray:2 5;stroke-width:1.9}
svg .dot{fill:var(--c);stroke:var(--card);stroke-width:1}
svg .dot:hover{stroke:var(--ink);stroke-width:2}
svg .level{stroke:var(--muted);stroke-dasharray:6 4}
svg .strip{fill:var(--grid);fill-opacity:.55;rx:5px}
svg line.bound{stroke:var(--ink);stroke-width:2.4}
svg text.bound{fill:var(--ink)}
svg .out .dot{fill:var(--card);stroke:var(--c);stroke-width:1.6}
svg .other{--c:var(--muted)}svg .other .dot{fill-opacity:.75}
svg .path{stroke:var(--s0);stroke-width:1.4;stroke-dasharray:3 4}
svg .minus{fill:var(--minus)}
svg .plus{fill:var(--plus)}
.key{margin-top:12px}
.headline{font-size:1.25rem;overflow-wrap:anywhere;line-height:1.4;font-weight:640;
 margin:0 0 10px;max-width:none}
.facts{margin:0;font-size:.95rem}
.facts div{display:grid;grid-template-columns:minmax(7.5rem,24%) minmax(0,1fr);gap:14px;
 padding:7px 0;border-top:1px solid var(--grid);break-inside:avoid}
.facts dt{color:var(--muted)}
.facts dd{margin:0;overflow-wrap:anywhere}
.caveats{border-left:4px solid var(--s1);padding:2px 0 2px 14px;margin:16px 0 0;max-width:74ch}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:14px;
 padding:6px 16px 10px;margin-top:14px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);font-size:.86rem;padding:8px 0}
caption span{display:block;position:sticky;left:0;max-width:min(100%,100vw - 60px)}
th,td{text-align:left;padding:6px 14px 6px 0;border-top:1px solid var(--grid);vertical-align:top}
th:last-child,td:last-child{padding-right:0}
thead th{border-top:0;color:var(--muted);font-weight:550;white-space:nowrap;vertical-align:bottom}
tbody th{font-weight:550;min-width:8.5rem;max-width:18rem;overflow-wrap:anywhere}
.num+:not(.num){padding-left:10px}
.num{text-align:right;white-space:nowrap}
td:last-child:not(.num){min-width:11rem}
tr.strong>*{font-weight:680;color:var(--s0)}
.swatch{display:inline-block;width:.72em;height:.72em;border-radius:50%;margin-right:.5em;
 background:var(--c)}
details{margin:12px 0 0;font-size:.92rem}
details .scroll{border:0;padding:0;margin:4px 0 0;border-radius:0}
summary{cursor:pointer;color:var(--muted)}
pre{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:14px 18px;
 overflow-x:auto;font:13.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
 margin:12px 0}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
footer{margin-top:48px;padding-top:14px;border-top:1px solid var(--rule);color:var(--muted);
 font-size:.86rem}
@media (min-width:860px){
 .two svg text{font-size:9.6px}
 .two svg text.small{font-size:9.2px}
 .two{grid-template-columns:repeat(2,minmax(0,1fr))}
 .three{grid-template-columns:repeat(3,minmax(0,1fr))}
 .facts{columns:2;column-gap:40px}
}
@media (max-width:560px){
 .page{padding:0 14px 40px}
 .tiles{gap:10px}.tile{flex-basis:40%}.tile.wide{flex-basis:100%}
 .tile{padding:12px 13px}.tile .big{font-size:1.35rem}
 figure,.card{padding:13px 12px}
 .scroll{padding:4px 12px 8px}
 .facts div{grid-template-columns:minmax(0,1fr);gap:0}
}
@page{margin:13mm}
@media print{
 :root{--ground:#fff}
 body{font-size:10pt}
 .facts{columns:2;column-gap:28px}
 .facts div{padding:5px 0}
 footer{margin-top:20px}
 .theme,summary{display:none}
 .page{max-width:none;padding:0}
 section{padding-top:22px}
 figure,.card,.tile,tr,pre{break-inside:avoid}
 h2,h3{break-after:avoid}
 .two{grid-template-columns:repeat(2,minmax(0,1fr))}
 .three{grid-template-columns:repeat(3,minmax(0,1fr))}
 .scroll{overflow:visible}
 .scroll table{font-size:8pt}
 th,td{padding:4px 9px 4px 0}
 thead th,.num{white-space:normal}
 tbody th{min-width:0}
 pre{white-space:pre-wrap}
}
"""


def sheet() -> Markup:
    """The style sheet, as an element.

    ``light-dark()`` follows ``color-scheme``, which follows the system, the switch of the page and
    paper. A browser that does not know it shows the light colours.
    """
    light = ";".join(f"--{name}:{one}" for name, (one, _) in PALETTE.items())
    both = ";".join(f"--{name}:light-dark({a},{b})" for name, (a, b) in PALETTE.items())
    hues = "".join(f".s{i}{{--c:var(--s{i})}}" for i in range(6))
    rules = (
        f":root{{color-scheme:light;{light}}}\n"
        f"@supports (color:light-dark(#000,#fff)){{:root{{color-scheme:light dark;{both}}}\n"
        ":root:has(#light:checked){color-scheme:light}\n"
        ":root:has(#dark:checked){color-scheme:dark}\n"
        "@media print{:root,:root:has(#dark:checked){color-scheme:light}}}\n"
        f"{hues}{_RULES}"
    )
    return tag("style", Markup(rules))  # browsers decode no entities in a style element
