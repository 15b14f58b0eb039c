import{a as Xt,b as _,c as B}from"./chunk-OIR3DQMC.js";import{$ as xt,A as T,B as Lt,C as tt,D as gt,E as J,G as Rt,H as bt,I as vt,J as S,K as E,L as It,P as yt,Q as de,R as C,S as Bt,T as D,U as pe,W as me,X as fe,Y as he,Z as ge,_ as Pt,aa as be,ba as ve,ca as ye,da as xe,e as ae,ea as qt,f as Q,fa as W,g as nt,ga as wt,h as oe,ha as Dt,i as ne,ia as we,ja as ke,k as ft,l as re,m as G,n as Et,o as ie,p as jt,q as le,r as q,s as At,t as ce,u as Nt,v as Z,w as ht,x as h,y as $e,z as ue}from"./chunk-O2GDGKNJ.js";import{A as se,E as mt,a as Yt,b as O,c as z,d as ut,f as n,g,h as w,i as P,j as A,k as dt,l as v,m as F,n as pt,o as ot,p as St,q as M,r as zt,t as Qt,x as Zt,y as te,z as ee}from"./chunk-567ORPDC.js";var st=560,j=300,kt=70,Mt=78,U=12,H=36,et={x:st-42,columns:2,rows:15},K=4,Oe=t=>t.outcome==="accepted",ss=t=>t.outcome==="rejected",Kt=(t,e)=>t.kind==="scale-up"&&!e.saturated;function as(t,e){let s=[];for(let a=e;a!=null;a=t[a].parent)s.push(a);return s}function os(t){return t.filter(s=>s.traffic_bytes>0).length?{read:s=>s.traffic_bytes,show:w,title:"traffic from the level outside"}:{read:s=>s.seconds,show:g,title:"estimate of the best program with it"}}var Me=(t,e,s,a)=>r=>s+(a-s)*Math.log(r/t)/Math.log(e/t);function _e(t,e){let s=t.filter(a=>a>0);return s.length?[Math.min(...s)/e,Math.max(...s)*e]:[1,2]}function ns([t,e]){let s=Math.ceil(Math.log2(t)),a=Math.floor(Math.log2(e)),r=Math.ceil((a-s+1)/8)||1;return Array.from({length:Math.max(0,Math.floor((a-s)/r)+1)},(o,i)=>2**(s+i*r))}function rs(t,e){let s=os(t),a=t.filter($=>s.read($)>0),r=_e([...a.map($=>$.footprint_bytes),e],1.5),o=_e(a.map(s.read),1.2),i=Me(...r,kt,st-Mt),c=Me(...o,j-H,U),p=0;return{points:t.map($=>{if($.footprint_bytes>0&&s.read($)>0)return[i($.footprint_bytes),c(s.read($))];let y=p++%(et.columns*et.rows);return[et.x+16*(y%et.columns),U+24+15*Math.floor(y/et.columns)]}),x:i,y:c,xs:r,ys:o,upright:s,refused:p}}function Te({tried:t,now:e}){let{device:s}=h.value,a=t.steps,r=_(s,t.level),o=t.capacity_bytes,{points:i,x:c,y:p,xs:l,ys:$,upright:y,refused:u}=rs(a,o),f=new Set(as(a,e)),m=new Set((C.value?.found??[]).filter(d=>d.search===E.value).map(d=>d.step)),b=`${M(a.length,"tile")} tried for ${t.level}: footprint against ${y.title}`;return n`<svg viewBox=${`0 0 ${st} ${j}`} class="landscape" role="img" aria-label=${b} data-testid="tiles">
    ${ns(l).map(d=>n`<line x1=${c(d)} x2=${c(d)} y1=${U} y2=${j-H} class="grid" />
      <text x=${c(d)} y=${j-H+13} class="tick" text-anchor="middle">${w(d)}</text>`)}
    <line x1=${kt} x2=${st-Mt} y1=${j-H} y2=${j-H} class="axis-line" />
    <text x=${(kt+st-Mt)/2} y=${j-4} class="label" text-anchor="middle">footprint in ${t.level}</text>
    <text x=${-(j-H)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">${y.title}</text>
    ${[$[0]*1.2,Math.sqrt($[0]*$[1]),$[1]/1.2].map(d=>n`<text x=${kt-5} y=${p(d)+3} class="tick" text-anchor="end">${y.show(d)}</text>`)}
    ${o>0&&n`<rect x=${c(o)} y=${U} width=${st-Mt-c(o)+14} height=${j-H-U} class="wall" />
      <line x1=${c(o)} x2=${c(o)} y1=${U} y2=${j-H} style=${`stroke:${r};stroke-width:1.5`} />
      <text x=${c(o)-4} y=${U+8} class="tick" text-anchor="end" style=${`fill:${B(s,t.level)}`}>capacity ${w(o)}</text>`}
    ${u>0&&n`<text x=${et.x+8} y=${U+8} class="tick" text-anchor="middle">refused early</text>`}
    ${a.map((d,k)=>d.parent!=null&&n`<line x1=${i[d.parent][0]} y1=${i[d.parent][1]} x2=${i[k][0]} y2=${i[k][1]}
      class=${f.has(k)?"edge on":k<=e?"edge":"edge later"} style=${f.has(k)?`stroke:${r}`:""} />`)}
    ${a.map((d,k)=>{let[L,R]=i[k];return n`<g class=${k>e?"spot later":"spot"} onClick=${()=>W(E.value,k)}>
        <circle cx=${L} cy=${R} r="9" fill="transparent" />
        ${ss(d)?n`<path d=${`M${L-K} ${R-K}l${2*K} ${2*K}m0-${2*K}l-${2*K} ${2*K}`} class="cross" />`:n`<circle cx=${L} cy=${R} r=${K} style=${Kt(t,d)?`fill:var(--paper);stroke:${r};stroke-width:1.5`:`fill:${r}`} />`}
        ${m.has(k)&&n`<circle cx=${L} cy=${R} r="8" class="won" />`}${k===e&&n`<circle cx=${L} cy=${R} r="11" class="now" />`}
        <title>${ot(t.axes,d.tile)}: ${d.footprint_bytes>0?w(d.footprint_bytes):"no footprint"}, ${d.limit?.rule??d.outcome}${d.seconds?`, ${g(d.seconds)}`:""}</title>
      </g>`})}
  </svg>`}var Ce=({tried:t})=>n`<ul class="legend">
  ${t.kind==="scale-up"&&n`<li><i class="ring" style=${`--c:${_(h.value.device,t.level)}`}></i>fits</li>
    <li><i class="disc" style=${`--c:${_(h.value.device,t.level)}`}></i>fits and is large enough</li>`}
  <li><i class="bad">✕</i>refused</li><li><i class="ring" style="--c:var(--ink)"></i>of the chosen program</li></ul>`;var Ht=168,is=64,ls=["k","inner","reduce","tap"];function cs({roles:t,extents:e}){let s=i=>t.indexOf(i);if(s("m")>=0&&s("n")>=0)return[s("m"),s("n"),s("k")];let a=t.map((i,c)=>c).filter(i=>!ls.includes(t[i])),[r=0,o=r]=a.sort((i,c)=>e[c]-e[i]).slice(0,2).sort((i,c)=>i-c);return[r,o,s("k")]}function $s(t,e){let[s,a]=h.value.device.tile_levels,r=C.value?.program.tiles,o=r&&Object.keys(r[s]??{}).join()===t.axes.join(),i=c=>t.axes.map(p=>r[c]?.[p]??1);return t.level===s?{block:e.tile,thread:e.base??t.base??(o?i(a):e.tile)}:{block:o?i(s):e.tile,thread:e.tile}}function us({name:t,size:e,inner:s,colour:a,innerColour:r,axes:[o,i,c],names:p,depth:l,note:$}){let y=Math.max(e[o],e[i]),u=l?Math.min(l,y):0,f=Ht/(y+u),m=Math.max(3,e[i]*f),b=Math.max(3,e[o]*f),d=u&&Math.max(4,u*f),k=s?Math.max(2,Math.min(m,s[i]*f)):0,L=s?Math.max(2,Math.min(b,s[o]*f)):0,R=(I,$t)=>$t>3&&I/$t>1.5?Array.from({length:Math.min(Math.round(I/$t),is)-1},(Ma,es)=>$t*(es+1)):[],ts=`${t}: ${p[o]} ${e[o]} by ${p[i]} ${e[i]}${l?`, ${p[c]} ${l}`:""}`;return n`<figure><svg viewBox=${`-20 -16 ${Ht+24} ${Ht+26}`} role="img" aria-label=${ts}>
    ${d>0&&n`<rect y=${d} width=${d} height=${b} class="strip" /><rect x=${d} width=${m} height=${d} class="strip" />
      <text x=${d/2} y=${d-3} class="tick" text-anchor="middle">${d>14?`${p[c]} ${l}`:""}</text>`}
    <g transform=${`translate(${d} ${d})`}>
      <rect width=${m} height=${b} style=${`fill:color-mix(in oklab, ${a} 13%, transparent);stroke:${a};stroke-width:1.5`} />
      ${R(m,k).map(I=>n`<line x1=${I} x2=${I} y2=${b} class="hair" style=${`stroke:${a}`} />`)}
      ${R(b,L).map(I=>n`<line y1=${I} y2=${I} x2=${m} class="hair" style=${`stroke:${a}`} />`)}
      ${s&&n`<rect width=${k} height=${L} style=${`fill:${r}`} opacity="0.85" />`}</g>
    <text x=${d+m/2} y="-5" class="tick" text-anchor="middle">${p[i]} ${e[i]}</text>
    <text transform=${`translate(-7 ${d+b/2}) rotate(-90)`} class="tick" text-anchor="middle">${p[o]} ${e[o]}</text>
  </svg><figcaption><b style=${`color:color-mix(in oklab, ${a} 70%, var(--ink))`}>${t}</b><span>${$}</span></figcaption></figure>`}function ds({axis:t,role:e,thread:s,block:a,whole:r}){let o=i=>r>1?Math.min(1,Math.log2(Math.max(1,i))/Math.log2(r)):1;return n`<div class="ruler"><span>${t}${e!==t&&n`<small>${e}</small>`}</span>
    <svg width="100%" height="12" role="img" aria-label=${`${t}: ${s} of ${a} of ${r}`}>
      <rect y="4" height="4" width="100%" class="track" /><rect y="2" height="8" width=${`${100*o(a)}%`} style="fill:var(--block)" opacity=".75" />
      <rect height="12" width=${`${Math.max(1,100*o(s))}%`} style="fill:var(--thread)" /></svg>
    <em>${s} <i>▸</i> ${a} <i>▸</i> ${r}</em></div>`}function Se({tried:t,tile:e}){let{device:s}=h.value,[a,r]=s.tile_levels,o=cs(t),[i,c,p]=o,{block:l,thread:$}=$s(t,e),y=t.extents,u=(m,b)=>Math.ceil(m[i]/b[i])*(c===i?1:Math.ceil(m[c]/b[c])),f=[{name:"whole result",size:y,inner:l,colour:"var(--outer)",innerColour:"var(--block)",note:M(u(y,l),"tile")},{name:`task in ${a}`,size:l,inner:$,colour:"var(--block)",innerColour:"var(--thread)",depth:p>=0?l[p]:0,note:M(u(l,$),"tile")},{name:`tile in ${r}`,size:$,colour:"var(--thread)",note:t.unit}];return n`<div class="nested" data-testid="tile"><div class="frames">${f.map(m=>n`<${us} ...${m} axes=${o} names=${t.axes} />`)}</div>
    <div class="rulers">${t.axes.map((m,b)=>n`<${ds} axis=${m} role=${t.roles[b]} thread=${$[b]} block=${l[b]} whole=${y[b]} />`)}</div></div>`}var ps=".cm-editor, input, select, textarea";function Ut({rule:t,needs:e,has:s}){let r=h.value.device.levels.some(({name:o})=>t===o||t.startsWith(`${o} `))||/memory|cache|page/.test(t)?w:dt;return`${t}: needs ${r(e)}, there is ${r(s)}`}function ms(t,e){let s=t.steps[e.parent];if(!s)return t.kind==="scale-up"?"Start":"Tried";if(e.axis==null)return`Made of ${ot(t.axes,s.tile)}`;let a=s.tile[e.axis],r=e.tile[e.axis];return`${t.axes[e.axis]} ${r>a?"grew":"shrank"} ${a} → ${r}`}function fs({tried:t,tile:e}){let s=ms(t,e),a=e.footprint_bytes>0&&t.capacity_bytes>0?`, ${v(e.footprint_bytes/t.capacity_bytes)} of the capacity`:"";if(e.outcome==="rejected")return n`<b>${s}</b>: <span class="bad">stopped by ${e.limit?Ut(e.limit):e.outcome}</span>.`;if(!Oe(e))return n`<b>${s}</b>: not aligned yet (${Ut(e.limit)}), so it grows on.`;let r=e.footprint_bytes>0?`fits in ${w(e.footprint_bytes)}${a}.`:"fits.",o=t.kind!=="scale-up"?"":Kt(t,e)?" Memory is still slower than compute: growing pays.":" Compute covers its memory time: it is large enough.";return n`<b>${s}</b>: ${r}${o}${e.seconds>0&&n` The best program with it takes <b>${g(e.seconds)}</b>.`}`}function hs({tried:t,tile:e}){if(!e.growth?.length)return null;let s=Math.max(1e-30,...e.growth.map(a=>a.reuse??0));return n`<table class="growth"><caption>It could grow along</caption>
    <thead><tr><th>axis</th><th>to</th><th class="r">needs</th><th class="r">moves</th><th>traffic saved per byte</th><th>outcome</th></tr></thead>
    <tbody>${e.growth.map((a,r)=>n`<tr class=${r===0?"first":""}>
      <th scope="row">${t.axes[a.axis]}</th><td>${a.extent}</td>
      <td class="r">${a.footprint_bytes>0?w(a.footprint_bytes):"–"}</td>
      <td class="r">${a.traffic_bytes>0&&e.traffic_bytes>0?v(a.traffic_bytes/e.traffic_bytes):"–"}</td>
      <td class="meter"><i style=${`width:${a.reuse==null?100:Math.max(1,100*a.reuse/s)}%;background:${_(h.value.device,t.level)}`}></i></td>
      <td class=${a.limit?"bad":"quiet"}>${a.limit?Ut(a.limit):a.reuse==null?"costs nothing":r===0?"tried first":""}</td></tr>`)}</tbody></table>`}function gs(){let t=new Set((C.value?.found??[]).map(s=>s.search)),e=new Map;return h.value.searches.forEach((s,a)=>{let r=[s.group,s.unit,s.view,s.family].filter(Boolean).join(" · ");e.set(r,[...e.get(r)??[],[s,a]])}),n`<select class="picker" aria-label="search" value=${E.value} onChange=${s=>W(Number(s.target.value),0)}>
    ${[...e].map(([s,a])=>n`<optgroup label=${s}>${a.map(([r,o])=>n`<option value=${o} selected=${o===E.value}>
      ${t.has(o)?"● ":""}${r.kind} · ${r.level}${r.base?` on ${r.base.filter(i=>i>1).join("×")||"1"}`:""}: ${M(r.steps.length,"tile")}</option>`)}</optgroup>`)}</select>`}var bs=()=>n`<div class="chain" role="group" aria-label="tiles of the chosen program">
  ${(C.value?.found??[]).map(t=>{let{level:e}=h.value.searches[t.search];return n`<button class=${t.search===E.value&&t.step===It.value?"on":""} style=${`--c:${B(h.value.device,e)}`} onClick=${()=>W(t.search,t.step)}>chosen ${e}</button>`})}</div>`;function Ee(){let t=h.value.searches[E.value],e=(t?.steps.length??0)-1,s=Math.min(It.value,e),a=o=>W(E.value,Math.max(0,Math.min(e,s+o)));if(z(()=>{let o=i=>{let c={ArrowRight:1,ArrowLeft:-1}[i.key];c&&!i.target.closest?.(ps)&&!i.altKey&&!i.metaKey&&!i.ctrlKey&&a(c)};return addEventListener("keydown",o),()=>removeEventListener("keydown",o)}),e<0)return n`<section class="panel"><h2>How the tile grew</h2><p class="quiet">This program has no tiles to choose.</p></section>`;let r=t.steps[s];return n`<section class="panel" aria-labelledby="construction-title" data-testid="stepper">
    <header><h2 id="construction-title">How the tile grew</h2><${gs} /><${bs} /></header>
    <div class="two"><div>
        <${Te} tried=${t} now=${s} /><${Ce} tried=${t} />
        <div class="scrubber">
          <button data-testid="step-previous" aria-label="previous step" disabled=${s===0} onClick=${()=>a(-1)}>←</button>
          <input type="range" min="0" max=${e} value=${s} aria-label="step" onInput=${o=>W(E.value,Number(o.target.value))} />
          <button data-testid="step-next" aria-label="next step" disabled=${s===e} onClick=${()=>a(1)}>→</button>
          <span>${s+1} of ${e+1}</span></div>
        <p class="saying" aria-live="polite" data-testid="step"><code>${ot(t.axes,r.tile)}</code> <${fs} tried=${t} tile=${r} /></p>
        <${hs} tried=${t} tile=${r} /></div>
      <${Se} tried=${t} tile=${r} /></div>
  </section>`}var vs=10;function ys(){let t=D.peek(),e=T.peek()?0:S.peek();return e>0?{...t,options:{...t.options,candidate:e+1}}:t}async function je(t){let e=D.peek(),s=()=>e===D.peek();try{let a=await mt(`/v1/kernels:${t}`,ys());for(;s()&&(vt.value=a,!a.done);)a=await se(`/v1/${a.name}?wait=${vs}`);s()&&a.response&&await me(a.response,s)}catch(a){s()&&(vt.value={done:!0,error:Zt(a)})}}function xs(t){if(!t)return"";if(t.error)return`failed: ${t.error.detail}`;let{stage:e,cache:s,queue_position:a,waiting_for:r}=t.metadata;return t.done?s==="hit"?"compiled before":"compiled":r?`no worker takes from ${r}`:a>0?`queued behind ${a}`:e}function Ae(){let t=vt.value,e=t&&!t.done,s=T.value?0:S.value;return n`<div class="compile">
    <button data-testid="compile" disabled=${!Dt.value||e} onClick=${()=>je("compile")}>Compile${s>0?` program ${s+1}`:""}</button>
    <button data-testid="measure" class="second" title="compile it, and time it on a worker that has the device" disabled=${!Dt.value||e} onClick=${()=>je("measure")}>Measure</button>
    <span data-testid="status" role="status" class=${t?.error?"bad":"quiet"}>${e&&n`<i class="busy"></i>`}${xs(t)}</span>
  </div>`}var Ne=2;function ks({name:t}){let e=ce.value[t]??1;return n`<label class="slider"><span>${t}</span>
    <input type="range" min=${-Ne} max=${Ne} step=${.5} value=${Math.log2(e)} aria-label=${t} aria-valuetext=${F(e)}
      onChange=${s=>ve(t,2**Number(s.target.value))} /><em>${F(e)}</em></label>
    ${Nt.value?.name===t&&n`<p class="quiet" data-testid="held" role="status">no further: ${Nt.value.reason}</p>`}`}var Le=({kernels:t})=>JSON.stringify(t.map(e=>e.program?.tiles??e.tiles));function Ms(){let t=gt.value.find(a=>a.target===q.value)?.candidates?.[0],e=h.value?.programs[0];if(!Z.value||!t||$e.value!==D.value)return null;let s=1-e.seconds/t.seconds;return n`<p data-testid="effect" role="status">${g(t.seconds)} → <b>${g(e.seconds)}</b>,${" "}
    ${Math.abs(s)<5e-4?"as before":`${v(Math.abs(s))} ${s>0?"less":"more"}`};${" "}
    ${Le(t)===Le(e)?"the tiles stay":"other tiles win"}.</p>`}function _s(){let t=Z.value??At.value,[e,s]=O(null),[a,r]=O(null),o=async c=>{s(c.target.value);try{let{hardware:p}=await mt("/v1/hardware:validate",{hardware:c.target.value});r(null),s(null),be(p)}catch(p){r(p.problem??{detail:p.message,errors:[]})}},i=a&&(a.errors.length?a.errors:[{message:a.detail}]);return n`<details><summary>as text</summary>
    <textarea aria-label="spec as text" rows="12" spellcheck="false" value=${e??JSON.stringify(t,null,1)} onChange=${o}></textarea>
    ${i?.map(c=>n`<p class="bad" role="alert">${c.line&&n`<b>${c.line}:${c.column}</b> `}${c.message}</p>`)}</details>`}function Re(){let t=Z.value??At.value,[e,s]=O(!1),a=({currentTarget:{open:r}})=>{s(r),r&&ye()};return n`<details class="spec" data-testid="spec" open=${e||Z.value!==null} onToggle=${a}>
    <summary>Another device: what if …</summary>
    ${t&&n`${Object.keys(re(t)).map(r=>n`<${ks} name=${r} />`)}<${Ms} />
      ${Z.value&&ht.value.some(r=>r.id===q.value)&&n`<button onClick=${()=>xt(q.value)}>as it is</button>`}<${_s} />`}
  </details>`}var Os=180,Ts=["float32","float16","bfloat16","float64","float8_e4m3","float8_e5m2","int8","uint8","int16","int32","int64","bool"];function Cs(){let t=ut(),e=ut(),s=ut();z(()=>{let o,i=!1;return import("./editor-VSO2J4KC.js").then(({createEditor:c})=>{if(i)return;let p=l=>{clearTimeout(o),o=setTimeout(()=>he(s.current=l),Os)};t.current.textContent="",e.current=c(t.current,G.peek(),p),e.current.mark(T.peek()?.errors??[])}),()=>{i=!0,e.current?.destroy()}},[]);let a=G.value,r=T.value;return z(()=>{a!==s.current&&e.current?.show(a)},[a]),z(()=>e.current?.mark(r?.errors??[]),[r]),n`<div class=${r?.errors.some(o=>o.line)?"editor wrong":"editor"} ref=${t}><pre>${G.peek()}</pre></div>`}function Ss(){let t=T.value,e=ue.value,s=t?.errors.length?t.errors:t?[{message:t.detail}]:[];return n`<div class="diagnostics" data-testid="diagnostics" role="status">
    ${s.map(a=>n`<p><b>${a.line?`${a.line}:${a.column}`:Es(a.pointer)??t.code}</b> ${a.message}
      ${a.hint&&n`<span>${a.hint}</span>`}</p>`)}
    ${t&&!wt.value&&n`<p><button data-testid="again" onClick=${we}>ask again</button></p>`}
    ${Lt.value&&n`<p class="bad" data-testid="trouble">${Lt.value}</p>`}
    ${tt.value&&n`<p class="quiet">explaining…</p>`}
    ${!t&&!tt.value&&e!=null&&n`<p class="quiet">explained in ${Math.round(e)} ms</p>`}
  </div>`}var Es=t=>t?.replace(/^\/inputs\//,"").replaceAll("/"," "),js=t=>t.trim()?t.split(/[^\d]+/).filter(Boolean).map(Number):[];function As(){let t=Object.entries(Et.value);return t.length?n`<table class="inputs"><caption class="unseen">Inputs</caption>
    <thead><tr><th>input</th><th>type</th><th>shape</th><th title="does not change from call to call, such as weights">fixed</th></tr></thead>
    <tbody>${t.map(([e,{dtype:s,shape:a}])=>n`<tr key=${e}>
      <th scope="row">${e}</th>
      <td><select aria-label=${`type of ${e}`} value=${s} onChange=${r=>Pt(e,{dtype:r.target.value,shape:a})}>
        ${[...new Set([...Ts,s])].map(r=>n`<option selected=${r===s}>${r}</option>`)}</select></td>
      <td><input aria-label=${`shape of ${e}`} value=${a.join(" × ")} inputmode="numeric"
        onChange=${r=>Pt(e,{dtype:s,shape:js(r.target.value)})} /></td>
      <td><input type="checkbox" aria-label=${`${e} is constant`} checked=${ie.value.includes(e)}
        onChange=${r=>xe(e,r.target.checked)} /></td>
    </tr>`)}</tbody></table>`:null}function Ns(){let t={...jt.value&&{outputs:jt.value},...le.value};return Object.keys(t).length?n`<p class="quiet" data-testid="options">${Object.entries(t).map(([e,s])=>`${e} ${typeof s=="string"?s:JSON.stringify(s)}`).join(" · ")}
    <button onClick=${ge}>without</button></p>`:null}function Ls(){let t=h.value?.device;return t?n`<section class="device"><h2>${t.name}</h2>
    <p class="quiet">${M(t.cores,"core")} · ${t.levels.filter(e=>e.name!==t.tile_levels[1]).map(e=>n`<span style=${`color:${B(t,e.name)}`}>${e.name} ${A(e.bandwidth_bytes_per_s,"B")}${e.assumed?"?":""}</span> `)}</p></section>`:null}function Rs(t){let e=t.candidates?.[0];return e?{target:t.target,seconds:e.seconds,bound:e.bound,floor:t.floor.seconds}:{target:t.target,refused:t.error?.detail??"no candidate"}}var Is=8;function Bs(){let t=gt.value.map(Rs),e=t.length?t:ht.value.map(o=>({target:o.id}));e.sort((o,i)=>(o.seconds??1/0)-(i.seconds??1/0));let s=Is*(e[0]?.seconds??1),a=Math.min(s,Math.max(...e.map(o=>o.seconds??0))),r=o=>`${Math.min(100,100*o/a)}%`;return n`<section class="elsewhere" data-testid="target"><h2>Devices</h2>
    ${e.map(o=>n`<button key=${o.target} data-testid=${`target-${o.target}`} class=${o.target===q.value?"on":""}
      aria-pressed=${o.target===q.value} title=${o.refused??`bound by ${o.bound}`} onClick=${()=>xt(o.target)}>
      <span>${zt(o.target)}</span>
      ${o.seconds?n`<svg height="10" width="100%" aria-hidden="true">
          <rect width=${r(o.seconds)} height="10" class=${o.seconds>a?"estimate cut":"estimate"} />
          <rect width=${r(o.floor)} height="10" class="floor" /></svg><em>${g(o.seconds)}</em>`:n`<small>${o.refused?"refused":""}</small><em></em>`}
    </button>`)}
    ${t.length>0&&n`<p class="quiet">Dark: no tiles go below this on the device.</p>`}</section>`}function Ie(){let t=ft.findIndex(e=>e.expression===G.value&&e.target===q.value&&JSON.stringify(e.inputs)===JSON.stringify(Et.value));return n`<aside class="desk" aria-label="Program">
    <select class="examples" aria-label="example" value=${t} onChange=${e=>fe(ft[e.target.value])}>
      ${t<0&&n`<option value="-1" selected>examples…</option>`}
      ${ft.map((e,s)=>n`<option value=${s} selected=${s===t}>${e.name}</option>`)}</select>
    <${Cs} /><${Ss} /><${As} /><${Ns} /><${Ae} /><${Ls} /><${Re} /><${Bs} />
  </aside>`}var Ps="[\\x21-\\x7e]+";function Be({load:t}){return te.value?n`<form class="key" onSubmit=${s=>{s.preventDefault(),ee(new FormData(s.currentTarget).get("key")),t()}}>
    <label>This service needs an API key <input name="key" type="password" autocomplete="off" required pattern=${Ps} title="letters, digits and signs of ASCII, without spaces" autofocus /></label>
    <button>use it in this tab</button>
  </form>`:null}var Pe=()=>n`<svg width="0" height="0" aria-hidden="true" class="unseen"><defs>
  <pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="5" height="5" style="fill:var(--paper-2)" /><rect width="2.4" height="5" style="fill:var(--exposed)" />
  </pattern></defs></svg>`,x=({seconds:t,fraction:e=1})=>e*t,qs=(t,e)=>x(e)-x(t),Ds=t=>t.reduce((e,s)=>e+x(s),0),V=(t,e)=>t.terms.filter(s=>s.combines===e&&x(s)>0).sort(qs);function rt(t){let e=V(t,"sums");return[...V(t,"overlaps").map(a=>[a]),...e.length?[e]:[]].map(a=>({terms:a,name:a.map(r=>r.name).join(" + "),seconds:Ds(a)})).sort((a,r)=>r.seconds-a.seconds)}var Gt=t=>[...V(t,"adds"),...V(t,"after")];function Ks(t){let e=[],s=[],a=0,r=(o,i)=>{e.push({name:o,seconds:i,start:a}),a+=i};for(let o of t){let i=a,[c,...p]=rt(o);for(let $ of c?.terms??[])r($.name,x($));for(let $ of p)s.push({name:$.terms[0].name,label:$.name,seconds:$.seconds,at:i+$.seconds});for(let $ of V(o,"adds"))r($.name,x($));let[l]=V(o,"floor");l&&x(l)>a-i&&r(l.name,x(l)-(a-i));for(let $ of V(o,"after"))r($.name,x($))}return{parts:e,marks:s}}function _t({kernels:t,device:e,longest:s,height:a=14}){let{parts:r,marks:o}=Ks(t),i=l=>`${100*l/s}%`,c=l=>l==="exposed"?"url(#hatch)":_(e,l),p=r.map(l=>`${l.name} ${g(l.seconds)}`).join(", then ");return n`<svg class="terms" width="100%" height=${a} role="img" aria-label=${p}>
    ${r.map(l=>n`<rect x=${i(l.start)} width=${i(l.seconds)} height=${a} style=${`fill:${c(l.name)}`}>
      <title>${l.name}: ${g(l.seconds)}</title></rect>`)}
    ${r.slice(1).map(l=>n`<line x1=${i(l.start)} x2=${i(l.start)} y2=${a} class="cut" />`)}
    ${o.map(l=>n`<line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} class="under" />
      <line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} style=${`stroke:${c(l.name)};stroke-width:2`}>
        <title>${l.label} would be done after ${g(l.seconds)}</title></line>`)}
  </svg>`}function qe({kernels:t,device:e}){let s=new Map;for(let a of t.flatMap(r=>r.terms))s.set(a.name,(s.get(a.name)??0)+x(a));return n`<ul class="legend">${[...s].map(([a,r])=>n`<li>
    <i class=${a==="exposed"?"dot hatched":"dot"} style=${`--c:${_(e,a)}`}></i>${a}<em>${g(r)}</em></li>`)}</ul>`}var Jt=6,Hs=2.5,Us=["contraction","attention",""],Fs=[["split_k",1,t=>`split-k ${t}`],["stages",1,t=>`${t} stages`],["stream_k",0,t=>`stream-k ${t}`],["pingpong",0,()=>"ping-pong"],["blocks",0,t=>`${t} persistent`],["raster",1,t=>`raster ${t}`]];function Gs(t){let e=Fs.filter(([a,r])=>t[a]>r).map(([a,,r])=>r(t[a])),s=[t.cluster_m,t.cluster_n,t.cluster_k].filter(a=>a>1);return[...e,s.length&&`cluster ${s.join("×")}`].filter(Boolean).join(", ")}var Js=t=>M(Q(t).length,"kernel")+(nt(t).length?`, ${nt(t).length} once`:""),De=(t,e)=>Object.entries(t.tiles[e]??{}).filter(([,s])=>s>1).map(([s,a])=>n`<span class="axis">${s}<b>${a}</b></span>`);function Ws({program:t}){let e=Rt.value[ae(t)],s=t.seconds/e-1;return e?n`<td class="r">${g(e)}</td><td class="r">${v(Math.abs(s))} ${s>0?"high":"low"}</td>`:n`<td class="r">–</td><td class="r"></td>`}function Ke(){let[t,e]=O(!1),{device:s,programs:a,constructions:r}=h.value,[o,i]=s.tile_levels,c=r.reduce((f,m)=>f+m.tiles_visited,0),p=r.flatMap(f=>f.refusals),l=t||S.value>=Jt?a:a.slice(0,Jt),$=Math.min(Math.max(...l.map(f=>f.seconds)),Hs*a[0].seconds),y=Object.keys(Rt.value).length>0,u=(f,m)=>{let b={ArrowDown:m+1,ArrowUp:m-1,Enter:m," ":m}[f.key];b===void 0||!l[b]||(f.preventDefault(),qt(b),f.currentTarget.parentNode.children[b].focus())};return n`<section class="panel" aria-labelledby="programs-title">
    <header><h2 id="programs-title">Ranked programs</h2><span class="quiet">the best of ${M(c,"tile")} · ↑ ↓ choose</span></header>
    <div class="scroll" tabindex="0" role="group" aria-label="table of programs"><table class="programs" data-testid="programs">
      <thead><tr><th class="r">#</th><th>unit</th><th>${o} tile</th><th>${i} tile</th><th>options</th><th class="wide">terms</th><th class="r">estimate</th>${y&&n`<th class="r">measured</th><th class="r">estimate is</th>`}<th class="r">waves</th><th class="r">occ.</th></tr></thead>
      <tbody>${l.map((f,m)=>{let b=oe(f),d=b.program;return n`<tr key=${m} tabindex=${m===S.value?0:-1} aria-current=${m===S.value} data-testid=${`program-${m}`} class=${m===S.value?"on":""}
          onClick=${()=>qt(m)} onKeyDown=${k=>u(k,m)}>
          <td class="r">${m+1}</td>
          <td>${d.unit}${!Us.includes(b.view??"")&&n`<small>${b.view}</small>`}${f.kernels.length>1&&n`<small>${Js(f)}</small>`}</td>
          <td>${De(d,o)}</td><td>${De(d,i)}</td><td class="options">${Gs(d)}</td>
          <td class="wide"><${_t} kernels=${Q(f)} device=${s} longest=${$} /></td>
          <td class="r strong">${g(f.seconds)}</td>${y&&n`<${Ws} program=${f} />`}<td class="r">${b.waves}</td><td class="r">${v(b.occupancy)}</td></tr>`})}</tbody></table></div>
    ${a.length>Jt&&n`<button class="more" onClick=${()=>e(!t)}>${t?"fewer":`all ${a.length}`}</button>`}
    ${p.length>0&&n`<details class="quiet"><summary>${M(p.length,"unit")} refused</summary><ul>${p.map(f=>n`<li>${f}</li>`)}</ul></details>`}
  </section>`}var Vs=({dtype:t,shape:e})=>`("${t}", (${e.join(", ")}${e.length===1?",":""}))`,Ys=t=>t.includes(`
`)?`"""
${t.replaceAll("\\","\\\\").replaceAll('"""','\\"\\"\\"')}
"""`:JSON.stringify(t);function Wt(t){return t===null?"None":typeof t=="boolean"?t?"True":"False":Array.isArray(t)?`[${t.map(Wt).join(", ")}]`:typeof t=="object"?`{${Object.entries(t).map(([e,s])=>`${JSON.stringify(e)}: ${Wt(s)}`).join(", ")}}`:JSON.stringify(t)}function Xs({expression:t,inputs:e,outputs:s,target:a,hardware:r,options:o}){let i=Object.entries(e).map(([l,$])=>`        "${l}": ${Vs($)},`),c=Object.entries({...s&&{outputs:s},...o}).map(([l,$])=>`    ${l}=${Wt($)},
`),p=Object.keys(e).map(l=>`"${l}": ${l}`).join(", ");return`import roller_svc

kernel = roller_svc.compile(
    ${Ys(t)},
    inputs={
${i.join(`
`)}
    },
    ${r?"hardware=spec,  # the changed spec: YAML or JSON text":`target=${JSON.stringify(a)}`},
${c.join("")})
results = kernel.run({${p}})`}var zs=t=>`'${t.replaceAll("'","'\\''")}'`,He='-H "Authorization: Bearer $ROLLER_API_KEY"',Qs=t=>`curl -s "$ROLLER_SERVER/v1/kernels:compile" ${He} \\
  -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
  -d ${zs(JSON.stringify(t))}`,Ue=(t,e)=>`curl -s "$ROLLER_SERVER/v1/kernels/${t}/bundle?launcher=${e}" ${He} -o kernel.zip
unzip -q kernel.zip -d kernel`,Zs=t=>`# with kernel/ in sys.path
import launch

results = launch.Kernel()(${Object.keys(t.inputs).map(e=>`${e}=${e}`).join(", ")})`,Ot=t=>(e,s)=>`${Ue(e,t)}

${Zs(s)}`,Fe=(t,e)=>(s,a,r)=>`${Ue(s,"cpp")}

#include "kernel/${t}"
${e(r)}`,ta={ctypes:Ot("ctypes"),torch:Ot("torch"),"c++":Fe("kernel.h",t=>`// ${t}_run(...) takes the addresses of inputs and results`)},ea={cupy:Ot("cupy"),torch:Ot("torch"),"c++":Fe("launch.hpp",t=>`${t}_launcher kernel;  // then kernel.load(image) and kernel.launch(addresses..., stream)`)};function Ge(t,e){let s={python:Xs(t),curl:Qs(t)};if(!e)return s;let a=e.launches[0].name.replace(/_kernel\d+$/,""),r=Object.entries(e.language==="c"?ta:ea);return{...s,...Object.fromEntries(r.map(([o,i])=>[o,i(e.digest,t,a)]))}}function sa(){let[t,e]=O("python"),[s,a]=O(!1),r=Ge(D.value,J.value),o=r[t]??r.python,i=async()=>{await navigator.clipboard.writeText(o),a(!0),setTimeout(()=>a(!1),1500)};return n`<div class="launch"><h3>Use it</h3>
    <div class="choices">${Object.keys(r).map(c=>n`<button aria-pressed=${c===t} onClick=${()=>e(c)}>${c}</button>`)}<button onClick=${i}>${s?"copied":"copy"}</button></div>
    <pre data-testid="launch-code" tabindex="0">${o}</pre></div>`}var Je=Qt(null),aa=()=>Promise.all([import("./code-3NIOV67F.js"),import("./compare-K5DWSNAK.js")]).then(([{Code:t},{Compare:e}])=>Je.value={Code:t,Compare:e});function oa({kernel:t}){let e=Je.value;return e?n`<${e.Code} kernel=${t} /><${e.Compare} kernel=${t} />`:void aa()}function na({kernel:t}){let[e]=t.resources,[s]=t.launches,a=[s&&`${M(t.launches.length,"launch").replace("launchs","launches")}`,t.language!=="c"&&s&&`grid ${s.grid.join("×")}, block ${s.block.join("×")}`,e?.registers_per_thread>0&&`${e.registers_per_thread} registers`,e?.shared_bytes>0&&`${w(e.shared_bytes)} shared`,e?.spill_bytes>0&&`spills ${w(e.spill_bytes)}`].filter(Boolean);return n`<p class="quiet">${a.join(" · ")} · <a class="mono" href=${`/k/${t.digest}`}>${t.digest.slice(0,19)}</a></p>
    ${h.value&&yt.value<0&&n`<p class="note">The kernel is none of the programs above.</p>`}
    ${t.notes.map(r=>n`<p class="note">${r}</p>`)}
    <${oa} kernel=${t} />`}function Vt(){let t=J.value;return n`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    ${t?n`<${na} kernel=${t} />`:n`<p class="quiet">Not compiled: all of the above is the model's word. Compile builds the chosen program.</p>`}
    ${G.value&&n`<${sa} />`}</section>`}var Y=460,X=280,at=54,it=34,We=14,lt=14;function ra({terms:t,operations:e}){let s=t.filter(r=>r.unit==="operations").sort((r,o)=>o.amount-r.amount),a=t.find(r=>r.name==="compute");return s[0]?.rate??(a&&e.executed/a.seconds)}function Ve(){let{device:t}=h.value,e=C.value,s=e.operations.executed,a={name:e.program.unit,rate:ra(e)},r=t.levels.filter(o=>o.name!==t.tile_levels[1]).map(o=>({level:o,term:e.terms.find(i=>i.name===o.name&&i.unit==="B"&&i.amount>0)})).filter(({term:o})=>o).map(({level:o,term:i})=>({name:o.name,rate:i.rate,moved:i.amount,intensity:s/i.amount,assumed:i.source==="assumed",fill:_(t,o.name)}));return{kernel:e,operations:s,unit:a,levels:r,reached:s/e.seconds}}function Ye(){let{unit:t,levels:e,reached:s}=Ve();if(!e.length||!(t.rate>0)||!(s>0))return null;let a=t.rate,r=e.flatMap(u=>[u.intensity,a/u.rate]),o=Math.min(...r)/4,i=Math.max(...r)*4,c=Math.max(a,s)*2.5,p=Math.min(s,a/30)/4,l=u=>at+(Y-at-lt)*Math.log(u/o)/Math.log(i/o),$=u=>X-it-(X-it-We)*Math.log(u/p)/Math.log(c/p),y=`${A(s,"operations")} of ${A(a,"operations")}: `+e.map(u=>`${u.name} ${pt(u.intensity)} op per byte`).join(", ");return n`<figure class="roofline"><svg viewBox=${`0 0 ${Y} ${X}`} data-testid="roofline" role="img" aria-label=${y}>
    ${St(o,i).map(u=>n`<line x1=${l(u)} x2=${l(u)} y1=${We} y2=${X-it} class="grid" />
      <text x=${l(u)} y=${X-it+13} class="tick" text-anchor="middle">${u<1?u.toPrecision(1):dt(u)}</text>`)}
    ${St(p,c).map(u=>n`<line x1=${at} x2=${Y-lt} y1=${$(u)} y2=${$(u)} class="grid" />
      <text x=${at-5} y=${$(u)+3} class="tick" text-anchor="end">${P(u,"").trim()}</text>`)}
    <text x=${(at+Y)/2} y=${X-4} class="label" text-anchor="middle">operations per byte of a level</text>
    <text x=${-(X-it)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">operations per second</text>
    <line x1=${l(Math.max(o,a/Math.max(...e.map(u=>u.rate))))} x2=${Y-lt} y1=${$(a)} y2=${$(a)} class="roof" />
    <text x=${Y-lt} y=${$(a)-4} class="tick strong" text-anchor="end">${t.name} ${A(a,"operations")}</text>
    ${e.map(u=>{let f=Math.max(o,p/u.rate),m=Math.min(i,a/u.rate);return n`<line x1=${l(f)} y1=${$(f*u.rate)} x2=${l(m)} y2=${$(m*u.rate)} style=${`stroke:${u.fill};stroke-width:2`} />`})}
    <line x1=${at} x2=${Y-lt} y1=${$(s)} y2=${$(s)} class="reached" />
    ${e.map(u=>n`<line x1=${l(u.intensity)} x2=${l(u.intensity)} y1=${$(s)} y2=${$(Math.min(a,u.intensity*u.rate))} style=${`stroke:${u.fill}`} class="headroom" />
      <circle cx=${l(u.intensity)} cy=${$(s)} r="5.5" style=${`fill:${u.fill}`}><title>${u.name}: ${w(u.moved)}, ${pt(u.intensity)} op/B</title></circle>`)}
  </svg><figcaption>A dot is below its own line by the bandwidth that its level leaves unused.</figcaption></figure>`}function Xe(){let{kernel:t,operations:e,unit:s,levels:a}=Ve(),r=(o,i)=>v(o/i/t.seconds);return n`<table class="levels"><thead><tr><th>level</th><th class="r">moves</th><th class="r">op/B</th><th class="r">busy</th></tr></thead><tbody>
    ${a.map(o=>n`<tr><th scope="row"><i class="dot" style=${`--c:${o.fill}`}></i>${o.name}${o.assumed?n`<small title="the rate is assumed, not measured"> ?</small>`:""}</th>
      <td class="r">${w(o.moved)}</td><td class="r">${pt(o.intensity)}</td><td class="r">${r(o.moved,o.rate)}</td></tr>`)}
    ${s.rate>0&&n`<tr><th scope="row"><i class="dot" style="--c:var(--compute)"></i>${s.name}</th><td class="r" colspan="2">${P(e,"operations")}</td><td class="r">${r(e,s.rate)}</td></tr>`}
  </tbody></table>`}var Qe=.01,ia=5,ze=t=>t.reduce((e,s)=>e+x(s),0),ct=({name:t})=>n`<i class="dot" style=${`--c:${_(h.value.device,t)}`}></i>`;function la({amount:t,unit:e,rate:s,source:a}){return e!=="B"&&e!=="operations"?"":`${P(t,e)} at ${A(s,e)}${a==="assumed"?" (assumed)":""}, `}function ca(t){let[e,s]=rt(t);if(e){let[o,...i]=e.terms,c=i.length?`${g(x(o))} of ${g(e.seconds)}, to which ${i.map(p=>p.name).join(", ")} add`:`${la(o)}${g(e.seconds)}`;return n`<li><${ct} name=${o.name} /><b>${o.name} takes longest</b>: ${c}.
      ${s&&` ${s.name} beside it would be done after ${g(s.seconds)}.`}</li>`}let[a,r]=Gt(t).sort((o,i)=>x(i)-x(o));return a?n`<li><${ct} name=${a.name} /><b>Mostly ${a.name}</b>: ${v(x(a)/t.seconds)} of the time${r&&`, then ${r.name} with ${v(x(r)/t.seconds)}`}. These terms add up.</li>`:null}function $a({name:t,unit:e}){return e==="B"?`${t} bandwidth`:Xt.includes(t)&&e==="operations"?"arithmetic rate":"issue rate"}function ua({limited_by:t=[]},e){let[s]=t,a=rt(e)[0]?.terms[0];if(!a||!s||s.saved<Qe)return null;let r=$a(a),o=t.find(i=>i.resource===r)??{resource:r,saved:0};return s===o||s.saved<2*o.saved?null:n`<li><${ct} name=${s.resource.split(" ")[0]} /><b>But ${s.resource} limits</b>: 10 % more of it saves ${v(s.saved)},
    10 % more ${o.resource} ${o.saved<5e-4?"nothing":`only ${v(o.saved)}`}.</li>`}function da(t){let e=Q(t),s=e.flatMap(Gt);if(!e.some(o=>rt(o).length)||ze(s)<Qe*t.seconds)return null;let a=new Map;for(let o of s)a.set(o.name,(a.get(o.name)??0)+x(o));let r=[...a].map(([o,i])=>`${o} ${g(i)}`).join(", ");return n`<li><${ct} name="exposed" />Not hidden: ${r}. That is ${v(ze(s)/t.seconds)} of the time.</li>`}function pa({operations:t}){let e=t.executed/t.definition;return Math.abs(e-1)>.02?n`<li><${ct} name="compute" />It executes ${P(t.executed,"operations")}, ${v(e)} of the${" "}
    ${P(t.definition,"operations")} of the definition.</li>`:null}function ma(t){let e=nt(t);return e.length?n`<li data-testid="once"><i class="dot" style="--c:var(--ink-3)"></i>Once, before all calls: ${g(e.reduce((s,a)=>s+a.seconds,0))}${" "}
    of ${e.map(s=>s.group).join(", ")}, of constants alone. No call has it.</li>`:null}function fa(t,e){return e?n`<li><i class="dot" style="--c:var(--ink-3)"></i>No tiles go below ${g(e.seconds)}${" "}
    (${e.arithmetic_seconds>e.traffic_seconds?`${P(e.operations,"operations")} on ${e.unit}`:`${w(e.bytes)} once through ${e.level}`}):${" "}
    this is ${F(t.seconds/e.seconds)} that.</li>`:null}function ha(t){let e=J.value?.measurement?.median_s;if(!e)return null;let s=t.seconds/e-1;return n`<li><i class="dot" style="--c:var(--good)"></i>Measured ${g(e)}: the estimate is ${v(Math.abs(s))} ${s>0?"high":"low"}.</li>`}function ga({resources:t}){if(!t)return n`<p class="quiet" data-testid="sensitivity">What more of each resource saves is known of the first program.</p>`;let e=t.filter(s=>s.saved>5e-4).slice(0,ia);return n`<div data-testid="sensitivity"><h3>10 % more of … saves</h3>
    ${e.map(({resource:s,saved:a})=>n`<div class="saves"><span>${s}</span>
      <svg height="8" width="100%" aria-hidden="true"><rect width=${`${Math.min(100,1e3*a)}%`} height="8" style=${`fill:${_(h.value.device,s.split(" ")[0])}`} /></svg>
      <em>${(100*a).toFixed(1)} %</em></div>`)}
    ${!e.length&&n`<p class="quiet">Nothing above 0.05 %.</p>`}</div>`}function Ze(){let{device:t,floor:e}=h.value,s=de.value,a=C.value,r=Q(s),o=[["bound",n`<span style=${`color:${B(t,s.bound)}`}>${s.bound}</span>`],e&&["above the floor",F(s.seconds/e.seconds)],["rate",A(ne(s)/s.seconds,"operations")],["waves",a.waves],["occupancy",v(a.occupancy)],s.uncertainty&&["true within",F(s.uncertainty)]].filter(Boolean);return n`<section class="panel verdict" aria-labelledby="verdict-title" data-testid="verdict">
    <h2 class="unseen" id="verdict-title">Verdict</h2>
    <div class="headline"><p class="big" data-testid="estimate">${g(s.seconds)}</p>
      <dl>${o.map(([i,c])=>n`<div><dt>${i}</dt><dd>${c}</dd></div>`)}</dl></div>
    <${_t} kernels=${r} device=${t} longest=${s.seconds} height=${26} />
    <${qe} kernels=${r} device=${t} />
    <div class="why"><div>
        <ul class="sentences">${ca(a)}${ua(s,a)}${da(s)}${pa(a)}${ma(s)}${fa(s,e)}${S.value===yt.value&&ha(s)}</ul>
        <div class="facts"><${ga} resources=${s.limited_by} /><${Xe} /></div></div>
      <${Ye} /></div>
  </section>`}var ba=()=>n`<svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
  <rect width="18" height="18" rx="2" style="fill:var(--outer)" />
  <rect width="12" height="12" style="fill:var(--block)" />
  <rect width="6" height="6" style="fill:var(--thread)" />
</svg>`,va=[["Kernel","/"],["Model","/m"],["Farm","/farm"]],Ct=/^\/m(\/|$)/.test(location.pathname)?"/m":location.pathname==="/farm"?"/farm":"/";function ya({address:t}){let[e,s]=O(!1),a=async o=>{navigator.clipboard&&(o.preventDefault(),await navigator.clipboard.writeText(new URL(t.value,location.href).href),s(!0),setTimeout(()=>s(!1),1500))},r=Bt.value==="dark"?"light":"dark";return n`<header class="top">
    <a class="brand" href="/"><${ba} /><b>roller</b></a>
    <nav aria-label="pages">${va.map(([o,i])=>n`<a href=${i} aria-current=${i===Ct?"page":null}>${o}</a>`)}</nav>
    <a class="link" data-testid="permalink" href=${t.value} onClick=${a}>${e?"copied":"copy link"}</a>
    <button class="theme" onClick=${()=>Bt.value=r}>${r}</button>
  </header>`}function xa(){let t=bt.value&&n`<p class="note" data-testid="remark">${bt.value}</p>`;return!h.value&&J.value?n`${t}<${Vt} />`:h.value?n`${T.value&&!bt.value&&n`<p class="note">Below is the last program ${wt.value?"without errors":"that was explained"}.</p>`}${t}<${Ze} /><${Ee} /><${Ke} /><${Vt} />`:n`<p class="waiting" role="status">${T.value?"":"Constructing tiles…"}</p>`}var wa=()=>n`<main class="kernel"><h1 class="unseen">Why this tile</h1><${Ie} /><div class=${["work",T.value&&"old",tt.value&&"waits"].filter(Boolean).join(" ")} aria-busy=${tt.value}><${xa} /></div></main>`,Tt=Ct==="/m"?await import("./modelpage-R6POHWQY.js"):Ct==="/farm"?await import("./farm-NILVRJBX.js"):{Page:wa,address:pe,load:ke};document.title={"/":"roller: see why this tile","/m":"roller: a model","/farm":"roller: the build farm"}[Ct];var ka=()=>n`<${Pe} /><${ya} address=${Tt.address} /><${Be} load=${Tt.load} /><${Tt.Page} />`;Tt.load();Yt(n`<${ka} />`,document.getElementById("app"));
