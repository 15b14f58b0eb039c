import{a as Qt,b as O,c as q}from"./chunk-OIR3DQMC.js";import{$ as xt,A as T,B as Lt,C as tt,D as gt,E as W,G as Bt,H as bt,I as vt,J as S,K as E,L as Pt,P as yt,Q as me,R as C,S as Rt,T as K,U as fe,W as he,X as ge,Y as be,Z as ve,_ as qt,aa as ye,ba as xe,ca as we,da as ke,e as ne,ea as Dt,f as Q,fa as V,g as nt,ga as wt,h as re,ha as Kt,i as ie,ia as Me,ja as kt,k as ft,ka as Oe,l as le,m as J,n as jt,o as ce,p as At,q as $e,r as N,s as Nt,t as ue,u as It,v as Z,w as ht,x as h,y as de,z as pe}from"./chunk-EYOE62Z3.js";import{A as se,B as ae,C as oe,G as mt,a as zt,b as _,c as R,d as ut,f as o,g,h as w,i as D,j as A,k as dt,l as v,m as F,n as pt,o as ot,p as Et,q as M,s as Zt,u as te,z as ee}from"./chunk-KN26FB55.js";var st=560,j=300,Mt=70,Ot=78,U=12,G=36,et={x:st-42,columns:2,rows:15},H=4,Ce=t=>t.outcome==="accepted",rs=t=>t.outcome==="rejected",Ht=(t,e)=>t.kind==="scale-up"&&!e.saturated;function is(t,e){let s=[];for(let a=e;a!=null;a=t[a].parent)s.push(a);return s}function ls(t){return t.filter(s=>s.traffic_bytes>0).length?{read:s=>s.traffic_bytes,show:w,title:"traffic from the level outside"}:{read:s=>s.seconds,show:g,title:"estimate of the best program with it"}}var _e=(t,e,s,a)=>n=>s+(a-s)*Math.log(n/t)/Math.log(e/t);function Te(t,e){let s=t.filter(a=>a>0);return s.length?[Math.min(...s)/e,Math.max(...s)*e]:[1,2]}function cs([t,e]){let s=Math.ceil(Math.log2(t)),a=Math.floor(Math.log2(e)),n=Math.ceil((a-s+1)/8)||1;return Array.from({length:Math.max(0,Math.floor((a-s)/n)+1)},(r,i)=>2**(s+i*n))}function $s(t,e){let s=ls(t),a=t.filter($=>s.read($)>0),n=Te([...a.map($=>$.footprint_bytes),e],1.5),r=Te(a.map(s.read),1.2),i=_e(...n,Mt,st-Ot),c=_e(...r,j-G,U),p=0;return{points:t.map($=>{if($.footprint_bytes>0&&s.read($)>0)return[i($.footprint_bytes),c(s.read($))];let y=p++%(et.columns*et.rows);return[et.x+16*(y%et.columns),U+24+15*Math.floor(y/et.columns)]}),x:i,y:c,xs:n,ys:r,upright:s,refused:p}}function Se({tried:t,now:e}){let{device:s}=h.value,a=t.steps,n=O(s,t.level),r=t.capacity_bytes,{points:i,x:c,y:p,xs:l,ys:$,upright:y,refused:u}=$s(a,r),f=new Set(is(a,e)),m=new Set((C.value?.found??[]).filter(d=>d.search===E.value).map(d=>d.step)),b=`${M(a.length,"tile")} tried for ${t.level}: footprint against ${y.title}`;return o`<svg viewBox=${`0 0 ${st} ${j}`} class="landscape" role="img" aria-label=${b} data-testid="tiles">
    ${cs(l).map(d=>o`<line x1=${c(d)} x2=${c(d)} y1=${U} y2=${j-G} class="grid" />
      <text x=${c(d)} y=${j-G+13} class="tick" text-anchor="middle">${w(d)}</text>`)}
    <line x1=${Mt} x2=${st-Ot} y1=${j-G} y2=${j-G} class="axis-line" />
    <text x=${(Mt+st-Ot)/2} y=${j-4} class="label" text-anchor="middle">footprint in ${t.level}</text>
    <text x=${-(j-G)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">${y.title}</text>
    ${[$[0]*1.2,Math.sqrt($[0]*$[1]),$[1]/1.2].map(d=>o`<text x=${Mt-5} y=${p(d)+3} class="tick" text-anchor="end">${y.show(d)}</text>`)}
    ${r>0&&o`<rect x=${c(r)} y=${U} width=${st-Ot-c(r)+14} height=${j-G-U} class="wall" />
      <line x1=${c(r)} x2=${c(r)} y1=${U} y2=${j-G} style=${`stroke:${n};stroke-width:1.5`} />
      <text x=${c(r)-4} y=${U+8} class="tick" text-anchor="end" style=${`fill:${q(s,t.level)}`}>capacity ${w(r)}</text>`}
    ${u>0&&o`<text x=${et.x+8} y=${U+8} class="tick" text-anchor="middle">refused early</text>`}
    ${a.map((d,k)=>d.parent!=null&&o`<line x1=${i[d.parent][0]} y1=${i[d.parent][1]} x2=${i[k][0]} y2=${i[k][1]}
      class=${f.has(k)?"edge on":k<=e?"edge":"edge later"} style=${f.has(k)?`stroke:${n}`:""} />`)}
    ${a.map((d,k)=>{let[L,B]=i[k];return o`<g class=${k>e?"spot later":"spot"} onClick=${()=>V(E.value,k)}>
        <circle cx=${L} cy=${B} r="9" fill="transparent" />
        ${rs(d)?o`<path d=${`M${L-H} ${B-H}l${2*H} ${2*H}m0-${2*H}l-${2*H} ${2*H}`} class="cross" />`:o`<circle cx=${L} cy=${B} r=${H} style=${Ht(t,d)?`fill:var(--paper);stroke:${n};stroke-width:1.5`:`fill:${n}`} />`}
        ${m.has(k)&&o`<circle cx=${L} cy=${B} r="8" class="won" />`}${k===e&&o`<circle cx=${L} cy=${B} r="11" class="now" />`}
        <title>${ot(t.axes,d.tile)}: ${d.footprint_bytes>0?w(d.footprint_bytes):"no footprint"}, ${d.limit?.rule??d.outcome}${d.seconds?`, ${g(d.seconds)}`:""}</title>
      </g>`})}
  </svg>`}var Ee=({tried:t})=>o`<ul class="legend">
  ${t.kind==="scale-up"&&o`<li><i class="ring" style=${`--c:${O(h.value.device,t.level)}`}></i>fits</li>
    <li><i class="disc" style=${`--c:${O(h.value.device,t.level)}`}></i>fits and is large enough</li>`}
  <li><i class="bad">✕</i>refused</li><li><i class="ring" style="--c:var(--ink)"></i>of the chosen program</li></ul>`;var Gt=168,us=64,ds=["k","inner","reduce","tap"];function ps({roles:t,extents:e}){let s=i=>t.indexOf(i);if(s("m")>=0&&s("n")>=0)return[s("m"),s("n"),s("k")];let a=t.map((i,c)=>c).filter(i=>!ds.includes(t[i])),[n=0,r=n]=a.sort((i,c)=>e[c]-e[i]).slice(0,2).sort((i,c)=>i-c);return[n,r,s("k")]}function ms(t,e){let[s,a]=h.value.device.tile_levels,n=C.value?.program.tiles,r=n&&Object.keys(n[s]??{}).join()===t.axes.join(),i=c=>t.axes.map(p=>n[c]?.[p]??1);return t.level===s?{block:e.tile,thread:e.base??t.base??(r?i(a):e.tile)}:{block:r?i(s):e.tile,thread:e.tile}}function fs({name:t,size:e,inner:s,colour:a,innerColour:n,axes:[r,i,c],names:p,depth:l,note:$}){let y=Math.max(e[r],e[i]),u=l?Math.min(l,y):0,f=Gt/(y+u),m=Math.max(3,e[i]*f),b=Math.max(3,e[r]*f),d=u&&Math.max(4,u*f),k=s?Math.max(2,Math.min(m,s[i]*f)):0,L=s?Math.max(2,Math.min(b,s[r]*f)):0,B=(P,$t)=>$t>3&&P/$t>1.5?Array.from({length:Math.min(Math.round(P/$t),us)-1},(Ta,ns)=>$t*(ns+1)):[],os=`${t}: ${p[r]} ${e[r]} by ${p[i]} ${e[i]}${l?`, ${p[c]} ${l}`:""}`;return o`<figure><svg viewBox=${`-20 -16 ${Gt+24} ${Gt+26}`} role="img" aria-label=${os}>
    ${d>0&&o`<rect y=${d} width=${d} height=${b} class="strip" /><rect x=${d} width=${m} height=${d} class="strip" />
      <text x=${d/2} y=${d-3} class="tick" text-anchor="middle">${d>14?`${p[c]} ${l}`:""}</text>`}
    <g transform=${`translate(${d} ${d})`}>
      <rect width=${m} height=${b} style=${`fill:color-mix(in oklab, ${a} 13%, transparent);stroke:${a};stroke-width:1.5`} />
      ${B(m,k).map(P=>o`<line x1=${P} x2=${P} y2=${b} class="hair" style=${`stroke:${a}`} />`)}
      ${B(b,L).map(P=>o`<line y1=${P} y2=${P} x2=${m} class="hair" style=${`stroke:${a}`} />`)}
      ${s&&o`<rect width=${k} height=${L} style=${`fill:${n}`} opacity="0.85" />`}</g>
    <text x=${d+m/2} y="-5" class="tick" text-anchor="middle">${p[i]} ${e[i]}</text>
    <text transform=${`translate(-7 ${d+b/2}) rotate(-90)`} class="tick" text-anchor="middle">${p[r]} ${e[r]}</text>
  </svg><figcaption><b style=${`color:color-mix(in oklab, ${a} 70%, var(--ink))`}>${t}</b><span>${$}</span></figcaption></figure>`}function hs({axis:t,role:e,thread:s,block:a,whole:n}){let r=i=>n>1?Math.min(1,Math.log2(Math.max(1,i))/Math.log2(n)):1;return o`<div class="ruler"><span>${t}${e!==t&&o`<small>${e}</small>`}</span>
    <svg width="100%" height="12" role="img" aria-label=${`${t}: ${s} of ${a} of ${n}`}>
      <rect y="4" height="4" width="100%" class="track" /><rect y="2" height="8" width=${`${100*r(a)}%`} style="fill:var(--block)" opacity=".75" />
      <rect height="12" width=${`${Math.max(1,100*r(s))}%`} style="fill:var(--thread)" /></svg>
    <em>${s} <i>▸</i> ${a} <i>▸</i> ${n}</em></div>`}function je({tried:t,tile:e}){let{device:s}=h.value,[a,n]=s.tile_levels,r=ps(t),[i,c,p]=r,{block:l,thread:$}=ms(t,e),y=t.extents,u=(m,b)=>Math.ceil(m[i]/b[i])*(c===i?1:Math.ceil(m[c]/b[c])),f=[{name:"whole result",size:y,inner:l,colour:"var(--outer)",innerColour:"var(--block)",note:M(u(y,l),"tile")},{name:`task in ${a}`,size:l,inner:$,colour:"var(--block)",innerColour:"var(--thread)",depth:p>=0?l[p]:0,note:M(u(l,$),"tile")},{name:`tile in ${n}`,size:$,colour:"var(--thread)",note:t.unit}];return o`<div class="nested" data-testid="tile"><div class="frames">${f.map(m=>o`<${fs} ...${m} axes=${r} names=${t.axes} />`)}</div>
    <div class="rulers">${t.axes.map((m,b)=>o`<${hs} axis=${m} role=${t.roles[b]} thread=${$[b]} block=${l[b]} whole=${y[b]} />`)}</div></div>`}var gs=".cm-editor, input, select, textarea";function Ut({rule:t,needs:e,has:s}){let n=h.value.device.levels.some(({name:r})=>t===r||t.startsWith(`${r} `))||/memory|cache|page/.test(t)?w:dt;return`${t}: needs ${n(e)}, there is ${n(s)}`}function bs(t,e){let s=t.steps[e.parent];if(!s)return t.kind==="scale-up"?"Start":"Tried";if(e.axis==null)return`Made of ${ot(t.axes,s.tile)}`;let a=s.tile[e.axis],n=e.tile[e.axis];return`${t.axes[e.axis]} ${n>a?"grew":"shrank"} ${a} → ${n}`}function vs({tried:t,tile:e}){let s=bs(t,e),a=e.footprint_bytes>0&&t.capacity_bytes>0?`, ${v(e.footprint_bytes/t.capacity_bytes)} of the capacity`:"";if(e.outcome==="rejected")return o`<b>${s}</b>: <span class="bad">stopped by ${e.limit?Ut(e.limit):e.outcome}</span>.`;if(!Ce(e))return o`<b>${s}</b>: not aligned yet (${Ut(e.limit)}), so it grows on.`;let n=e.footprint_bytes>0?`fits in ${w(e.footprint_bytes)}${a}.`:"fits.",r=t.kind!=="scale-up"?"":Ht(t,e)?" Memory is still slower than compute: growing pays.":" Compute covers its memory time: it is large enough.";return o`<b>${s}</b>: ${n}${r}${e.seconds>0&&o` The best program with it takes <b>${g(e.seconds)}</b>.`}`}function ys({tried:t,tile:e}){if(!e.growth?.length)return null;let s=Math.max(1e-30,...e.growth.map(a=>a.reuse??0));return o`<table class="growth"><caption>It could grow along</caption>
    <thead><tr><th>axis</th><th>to</th><th class="r">needs</th><th class="r">moves</th><th>traffic saved per byte</th><th>outcome</th></tr></thead>
    <tbody>${e.growth.map((a,n)=>o`<tr class=${n===0?"first":""}>
      <th scope="row">${t.axes[a.axis]}</th><td>${a.extent}</td>
      <td class="r">${a.footprint_bytes>0?w(a.footprint_bytes):"–"}</td>
      <td class="r">${a.traffic_bytes>0&&e.traffic_bytes>0?v(a.traffic_bytes/e.traffic_bytes):"–"}</td>
      <td class="meter"><i style=${`width:${a.reuse==null?100:Math.max(1,100*a.reuse/s)}%;background:${O(h.value.device,t.level)}`}></i></td>
      <td class=${a.limit?"bad":"quiet"}>${a.limit?Ut(a.limit):a.reuse==null?"costs nothing":n===0?"tried first":""}</td></tr>`)}</tbody></table>`}function xs(){let t=new Set((C.value?.found??[]).map(s=>s.search)),e=new Map;return h.value.searches.forEach((s,a)=>{let n=[s.group,s.unit,s.view,s.family].filter(Boolean).join(" · ");e.set(n,[...e.get(n)??[],[s,a]])}),o`<select class="picker" aria-label="search" value=${E.value} onChange=${s=>V(Number(s.target.value),0)}>
    ${[...e].map(([s,a])=>o`<optgroup label=${s}>${a.map(([n,r])=>o`<option value=${r} selected=${r===E.value}>
      ${t.has(r)?"● ":""}${n.kind} · ${n.level}${n.base?` on ${n.base.filter(i=>i>1).join("×")||"1"}`:""}: ${M(n.steps.length,"tile")}</option>`)}</optgroup>`)}</select>`}var ws=()=>o`<div class="chain" role="group" aria-label="tiles of the chosen program">
  ${(C.value?.found??[]).map(t=>{let{level:e}=h.value.searches[t.search];return o`<button class=${t.search===E.value&&t.step===Pt.value?"on":""} style=${`--c:${q(h.value.device,e)}`} onClick=${()=>V(t.search,t.step)}>chosen ${e}</button>`})}</div>`;function Ae(){let t=h.value.searches[E.value],e=(t?.steps.length??0)-1,s=Math.min(Pt.value,e),a=r=>V(E.value,Math.max(0,Math.min(e,s+r)));if(R(()=>{let r=i=>{let c={ArrowRight:1,ArrowLeft:-1}[i.key];c&&!i.target.closest?.(gs)&&!i.altKey&&!i.metaKey&&!i.ctrlKey&&a(c)};return addEventListener("keydown",r),()=>removeEventListener("keydown",r)}),e<0)return o`<section class="panel"><h2>How the tile grew</h2><p class="quiet">This program has no tiles to choose.</p></section>`;let n=t.steps[s];return o`<section class="panel" aria-labelledby="construction-title" data-testid="stepper">
    <header><h2 id="construction-title">How the tile grew</h2><${xs} /><${ws} /></header>
    <div class="two"><div>
        <${Se} tried=${t} now=${s} /><${Ee} tried=${t} />
        <div class="scrubber">
          <button data-testid="step-previous" aria-label="previous step" disabled=${s===0} onClick=${()=>a(-1)}>←</button>
          <input type="range" min="0" max=${e} value=${s} aria-label="step" onInput=${r=>V(E.value,Number(r.target.value))} />
          <button data-testid="step-next" aria-label="next step" disabled=${s===e} onClick=${()=>a(1)}>→</button>
          <span>${s+1} of ${e+1}</span></div>
        <p class="saying" aria-live="polite" data-testid="step"><code>${ot(t.axes,n.tile)}</code> <${vs} tried=${t} tile=${n} /></p>
        <${ys} tried=${t} tile=${n} /></div>
      <${je} tried=${t} tile=${n} /></div>
  </section>`}var ks=10;function Ms(){let t=K.peek(),e=T.peek()?0:S.peek();return e>0?{...t,options:{...t.options,candidate:e+1}}:t}async function Ne(t){let e=K.peek(),s=()=>e===K.peek();try{let a=await mt(`/v1/kernels:${t}`,Ms());for(;s()&&(vt.value=a,!a.done);)a=await oe(`/v1/${a.name}?wait=${ks}`);s()&&a.response&&await he(a.response,s)}catch(a){s()&&(vt.value={done:!0,error:ee(a)})}}function Os(t){if(!t)return"";if(t.error)return`failed: ${t.error.detail}`;let{stage:e,cache:s,queue_position:a,waiting_for:n}=t.metadata;return t.done?s==="hit"?"compiled before":"compiled":n?`no worker takes from ${n}`:a>0?`queued behind ${a}`:e}function Ie(){let t=vt.value,e=t&&!t.done,s=T.value?0:S.value;return o`<div class="compile">
    <button data-testid="compile" disabled=${!Kt.value||e} onClick=${()=>Ne("compile")}>Compile${s>0?` program ${s+1}`:""}</button>
    <button data-testid="measure" class="second" title="compile it, and time it on a worker that has the device" disabled=${!Kt.value||e} onClick=${()=>Ne("measure")}>Measure</button>
    <span data-testid="status" role="status" class=${t?.error?"bad":"quiet"}>${e&&o`<i class="busy"></i>`}${Os(t)}</span>
  </div>`}var Le=2;function Ts({name:t}){let e=ue.value[t]??1;return o`<label class="slider"><span>${t}</span>
    <input type="range" min=${-Le} max=${Le} step=${.5} value=${Math.log2(e)} aria-label=${t} aria-valuetext=${F(e)}
      onChange=${s=>xe(t,2**Number(s.target.value))} /><em>${F(e)}</em></label>
    ${It.value?.name===t&&o`<p class="quiet" data-testid="held" role="status">no further: ${It.value.reason}</p>`}`}var Be=({kernels:t})=>JSON.stringify(t.map(e=>e.program?.tiles??e.tiles));function Cs(){let t=gt.value.find(a=>a.target===N.value)?.candidates?.[0],e=h.value?.programs[0];if(!Z.value||!t||kt.value||de.value!==K.value)return null;let s=1-e.seconds/t.seconds;return o`<p data-testid="effect" role="status">${g(t.seconds)} → <b>${g(e.seconds)}</b>,${" "}
    ${Math.abs(s)<5e-4?"as before":`${v(Math.abs(s))} ${s>0?"less":"more"}`};${" "}
    ${Be(t)===Be(e)?"the tiles stay":"other tiles win"}.</p>`}function Ss(){let t=Z.value??Nt.value,[e,s]=_(null),[a,n]=_(null),r=async c=>{s(c.target.value);try{let{hardware:p}=await mt("/v1/hardware:validate",{hardware:c.target.value});n(null),s(null),ye(p)}catch(p){n(p.problem??{detail:p.message,errors:[]})}},i=a&&(a.errors.length?a.errors:[{message:a.detail}]);return o`<details><summary>as text</summary>
    <textarea aria-label="spec as text" rows="12" spellcheck="false" value=${e??JSON.stringify(t,null,1)} onChange=${r}></textarea>
    ${i?.map(c=>o`<p class="bad" role="alert">${c.line&&o`<b>${c.line}:${c.column}</b> `}${c.message}</p>`)}</details>`}function Pe(){let t=Z.value??Nt.value,[e,s]=_(!1),a=({currentTarget:{open:n}})=>s(n);return R(()=>{e&&!t&&we()},[e,t,N.value]),o`<details class="spec" data-testid="spec" open=${e||Z.value!==null} onToggle=${a}>
    <summary>Another device: what if …</summary>
    ${t&&o`${Object.keys(le(t)).map(n=>o`<${Ts} name=${n} />`)}<${Cs} />
      ${Z.value&&ht.value.some(n=>n.id===N.value)&&o`<button onClick=${()=>xt(N.value)}>as it is</button>`}<${Ss} />`}
  </details>`}var Es=180,js=["float32","float16","bfloat16","float64","float8_e4m3","float8_e5m2","int8","uint8","int16","int32","int64","bool"];function As(){let t=ut(),e=ut(),s=ut();R(()=>{let r,i=!1;return import("./editor-VSO2J4KC.js").then(({createEditor:c})=>{if(i)return;let p=l=>{clearTimeout(r),r=setTimeout(()=>be(s.current=l),Es)};t.current.textContent="",e.current=c(t.current,J.peek(),p),e.current.mark(T.peek()?.errors??[])}),()=>{i=!0,e.current?.destroy()}},[]);let a=J.value,n=T.value;return R(()=>{a!==s.current&&e.current?.show(a)},[a]),R(()=>e.current?.mark(n?.errors??[]),[n]),o`<div class=${n?.errors.some(r=>r.line)?"editor wrong":"editor"} ref=${t}><pre>${J.peek()}</pre></div>`}function Ns(){let t=T.value,e=pe.value,s=t?.errors.length?t.errors:t?[{message:t.detail}]:[];return o`<div class="diagnostics" data-testid="diagnostics" role="status">
    ${s.map(a=>o`<p><b>${a.line?`${a.line}:${a.column}`:Is(a.pointer)??t.code}</b> ${a.message}
      ${a.hint&&o`<span>${a.hint}</span>`}</p>`)}
    ${t&&!wt.value&&o`<p><button data-testid="again" onClick=${Me}>ask again</button></p>`}
    ${Lt.value&&o`<p class="bad" data-testid="trouble">${Lt.value}</p>`}
    ${tt.value&&o`<p class="quiet">explaining…</p>`}
    ${!t&&!tt.value&&e!=null&&o`<p class="quiet">explained in ${Math.round(e)} ms</p>`}
  </div>`}var Is=t=>t?.replace(/^\/inputs\//,"").replaceAll("/"," "),Ls=t=>t.trim()?t.split(/[^\d]+/).filter(Boolean).map(Number):[];function Bs(){let t=Object.entries(jt.value);return t.length?o`<table class="inputs"><caption class="unseen">Inputs</caption>
    <thead><tr><th>input</th><th>type</th><th>shape</th><th title="does not change from call to call, such as weights">fixed</th></tr></thead>
    <tbody>${t.map(([e,{dtype:s,shape:a}])=>o`<tr key=${e}>
      <th scope="row">${e}</th>
      <td><select aria-label=${`type of ${e}`} value=${s} onChange=${n=>qt(e,{dtype:n.target.value,shape:a})}>
        ${[...new Set([...js,s])].map(n=>o`<option selected=${n===s}>${n}</option>`)}</select></td>
      <td><input aria-label=${`shape of ${e}`} value=${a.join(" × ")} inputmode="numeric"
        onChange=${n=>qt(e,{dtype:s,shape:Ls(n.target.value)})} /></td>
      <td><input type="checkbox" aria-label=${`${e} is constant`} checked=${ce.value.includes(e)}
        onChange=${n=>ke(e,n.target.checked)} /></td>
    </tr>`)}</tbody></table>`:null}function Ps(){let t={...At.value&&{outputs:At.value},...$e.value};return Object.keys(t).length?o`<p class="quiet" data-testid="options">${Object.entries(t).map(([e,s])=>`${e} ${typeof s=="string"?s:JSON.stringify(s)}`).join(" · ")}
    <button onClick=${ve}>without</button></p>`:null}function Rs(){let t=h.value?.device;return t?o`<section class="device"><h2>${t.name}</h2>
    <p class="quiet">${M(t.cores,"core")} · ${t.levels.filter(e=>e.name!==t.tile_levels[1]).map(e=>o`<span style=${`color:${q(t,e.name)}`}>${e.name} ${A(e.bandwidth_bytes_per_s,"B")}${e.assumed?"?":""}</span> `)}</p></section>`:null}function qs(t){let e=t.candidates?.[0];return e?{target:t.target,seconds:e.seconds,bound:e.bound,floor:t.floor.seconds}:{target:t.target,refused:t.error?.detail??"no candidate"}}var Ds=8;function Ks(){let t=gt.value.map(qs),e=t.length>0&&kt.value,s=t.length?t:ht.value.map(i=>({target:i.id}));s.sort((i,c)=>(i.seconds??1/0)-(c.seconds??1/0));let a=Ds*(s[0]?.seconds??1),n=Math.min(a,Math.max(...s.map(i=>i.seconds??0))),r=i=>`${Math.min(100,100*i/n)}%`;return o`<section class="elsewhere" data-testid="target"><h2>Devices</h2>
    ${s.map(i=>o`<button key=${i.target} data-testid=${`target-${i.target}`} class=${i.target===N.value?"on":""}
      aria-pressed=${i.target===N.value} title=${e?"estimating":i.refused??`bound by ${i.bound}`} onClick=${()=>xt(i.target)}>
      <span>${Zt(i.target)}</span>
      ${e?o`<small></small><em>…</em>`:i.seconds?o`<svg height="10" width="100%" aria-hidden="true">
          <rect width=${r(i.seconds)} height="10" class=${i.seconds>n?"estimate cut":"estimate"} />
          <rect width=${r(i.floor)} height="10" class="floor" /></svg><em>${g(i.seconds)}</em>`:o`<small>${i.refused?"refused":""}</small><em></em>`}
    </button>`)}
    ${t.length>0&&o`<p class="quiet">Dark: no tiles go below this on the device.</p>`}</section>`}function Re(){let t=ft.findIndex(e=>e.expression===J.value&&e.target===N.value&&JSON.stringify(e.inputs)===JSON.stringify(jt.value));return o`<aside class="desk" aria-label="Program">
    <select class="examples" aria-label="example" value=${t} onChange=${e=>ge(ft[e.target.value])}>
      ${t<0&&o`<option value="-1" selected>examples…</option>`}
      ${ft.map((e,s)=>o`<option value=${s} selected=${s===t}>${e.name}</option>`)}</select>
    <${As} /><${Ns} /><${Bs} /><${Ps} /><${Ie} /><${Rs} /><${Pe} /><${Ks} />
  </aside>`}var Hs="[\\x21-\\x7e]+";function qe({load:t}){return se.value?o`<form class="key" onSubmit=${s=>{s.preventDefault(),ae(new FormData(s.currentTarget).get("key")),t()}}>
    <label>This service needs an API key <input name="key" type="password" autocomplete="off" required pattern=${Hs} title="letters, digits and signs of ASCII, without spaces" autofocus /></label>
    <button>use it in this tab</button>
  </form>`:null}var De=()=>o`<svg width="0" height="0" aria-hidden="true" class="unseen"><defs>
  <pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="5" height="5" style="fill:var(--paper-2)" /><rect width="2.4" height="5" style="fill:var(--exposed)" />
  </pattern></defs></svg>`,x=({seconds:t,fraction:e=1})=>e*t,Gs=(t,e)=>x(e)-x(t),Us=t=>t.reduce((e,s)=>e+x(s),0),Y=(t,e)=>t.terms.filter(s=>s.combines===e&&x(s)>0).sort(Gs);function rt(t){let e=Y(t,"sums");return[...Y(t,"overlaps").map(a=>[a]),...e.length?[e]:[]].map(a=>({terms:a,name:a.map(n=>n.name).join(" + "),seconds:Us(a)})).sort((a,n)=>n.seconds-a.seconds)}var Jt=t=>[...Y(t,"adds"),...Y(t,"after")];function Fs(t){let e=[],s=[],a=0,n=(r,i)=>{e.push({name:r,seconds:i,start:a}),a+=i};for(let r of t){let i=a,[c,...p]=rt(r);for(let $ of c?.terms??[])n($.name,x($));for(let $ of p)s.push({name:$.terms[0].name,label:$.name,seconds:$.seconds,at:i+$.seconds});for(let $ of Y(r,"adds"))n($.name,x($));let[l]=Y(r,"floor");l&&x(l)>a-i&&n(l.name,x(l)-(a-i));for(let $ of Y(r,"after"))n($.name,x($))}return{parts:e,marks:s}}function _t({kernels:t,device:e,longest:s,height:a=14}){let{parts:n,marks:r}=Fs(t),i=l=>`${100*l/s}%`,c=l=>l==="exposed"?"url(#hatch)":O(e,l),p=n.map(l=>`${l.name} ${g(l.seconds)}`).join(", then ");return o`<svg class="terms" width="100%" height=${a} role="img" aria-label=${p}>
    ${n.map(l=>o`<rect x=${i(l.start)} width=${i(l.seconds)} height=${a} style=${`fill:${c(l.name)}`}>
      <title>${l.name}: ${g(l.seconds)}</title></rect>`)}
    ${n.slice(1).map(l=>o`<line x1=${i(l.start)} x2=${i(l.start)} y2=${a} class="cut" />`)}
    ${r.map(l=>o`<line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} class="under" />
      <line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} style=${`stroke:${c(l.name)};stroke-width:2`}>
        <title>${l.label} would be done after ${g(l.seconds)}</title></line>`)}
  </svg>`}function Ke({kernels:t,device:e}){let s=new Map;for(let a of t.flatMap(n=>n.terms))s.set(a.name,(s.get(a.name)??0)+x(a));return o`<ul class="legend">${[...s].map(([a,n])=>o`<li>
    <i class=${a==="exposed"?"dot hatched":"dot"} style=${`--c:${O(e,a)}`}></i>${a}<em>${g(n)}</em></li>`)}</ul>`}var Wt=6,Js=2.5,Vt=["contraction","attention",""],Ws=[["split_k",1,t=>`split-k ${t}`],["stages",1,t=>`${t} stages`],["stream_k",0,t=>`stream-k ${t}`],["pingpong",0,()=>"ping-pong"],["blocks",0,t=>`${t} persistent`],["raster",1,t=>`raster ${t}`]];function Vs(t){let e=Ws.filter(([r,i])=>t[r]>i).map(([r,,i])=>i(t[r])),{cluster_m:s=1,cluster_n:a=1,cluster_k:n=1}=t;return[...e,s*a*n>1&&`cluster ${s}×${a}${n>1?`×${n}`:""}`].filter(Boolean).join(", ")}var Ys=t=>M(Q(t).length,"kernel")+(nt(t).length?`, ${nt(t).length} once`:""),He=(t,e)=>Object.entries(t.tiles[e]??{}).filter(([,s])=>s>1).map(([s,a])=>o`<span class="axis">${s}<b>${a}</b></span>`);function Xs({program:t}){let e=Bt.value[ne(t)],s=t.seconds/e-1;return e?o`<td class="r">${g(e)}</td><td class="r">${v(Math.abs(s))} ${s>0?"high":"low"}</td>`:o`<td class="r">–</td><td class="r"></td>`}function Ge(){let[t,e]=_(!1),{device:s,programs:a,constructions:n}=h.value,[r,i]=s.tile_levels,c=n.reduce((f,m)=>f+m.tiles_visited,0),p=n.flatMap(f=>f.refusals),l=t||S.value>=Wt?a:a.slice(0,Wt),$=Math.min(Math.max(...l.map(f=>f.seconds)),Js*a[0].seconds),y=Object.keys(Bt.value).length>0,u=(f,m)=>{let b={ArrowDown:m+1,ArrowUp:m-1,Enter:m," ":m}[f.key];b===void 0||!l[b]||(f.preventDefault(),Dt(b),f.currentTarget.parentNode.children[b].focus())};return o`<section class="panel" aria-labelledby="programs-title">
    <header><h2 id="programs-title">Ranked programs</h2><span class="quiet">the best of ${M(c,"tile")} · ↑ ↓ choose</span></header>
    <div class="scroll" tabindex="0" role="group" aria-label="table of programs"><table class="programs" data-testid="programs">
      <thead><tr><th class="r">#</th><th>unit</th><th>${r} tile</th><th>${i} tile</th><th>options</th><th class="wide">terms</th><th class="r">estimate</th>${y&&o`<th class="r">measured</th><th class="r">estimate is</th>`}<th class="r">waves</th><th class="r">occ.</th></tr></thead>
      <tbody>${l.map((f,m)=>{let b=re(f),d=b.program;return o`<tr key=${m} tabindex=${m===S.value?0:-1} aria-current=${m===S.value} data-testid=${`program-${m}`} class=${m===S.value?"on":""}
          onClick=${()=>Dt(m)} onKeyDown=${k=>u(k,m)}>
          <td class="r">${m+1}</td>
          <td>${d.unit}${!Vt.includes(b.view??"")&&o`<small>${b.view}</small>`}${f.kernels.length>1&&o`<small>${Ys(f)}</small>`}</td>
          <td>${He(d,r)}</td><td>${He(d,i)}</td><td class="options">${Vs(d)}</td>
          <td class="wide"><${_t} kernels=${Q(f)} device=${s} longest=${$} /></td>
          <td class="r strong">${g(f.seconds)}</td>${y&&o`<${Xs} program=${f} />`}<td class="r">${b.waves}</td><td class="r">${v(b.occupancy)}</td></tr>`})}</tbody></table></div>
    ${a.length>Wt&&o`<button class="more" onClick=${()=>e(!t)}>${t?"fewer":`all ${a.length}`}</button>`}
    ${p.length>0&&o`<details class="quiet"><summary>${M(p.length,"unit")} refused</summary><ul>${p.map(f=>o`<li>${f}</li>`)}</ul></details>`}
  </section>`}var zs=({dtype:t,shape:e})=>`("${t}", (${e.join(", ")}${e.length===1?",":""}))`,Qs=t=>t.includes(`
`)?`"""
${t.replaceAll("\\","\\\\").replaceAll('"""','\\"\\"\\"')}
"""`:JSON.stringify(t);function Yt(t){return t===null?"None":typeof t=="boolean"?t?"True":"False":Array.isArray(t)?`[${t.map(Yt).join(", ")}]`:typeof t=="object"?`{${Object.entries(t).map(([e,s])=>`${JSON.stringify(e)}: ${Yt(s)}`).join(", ")}}`:JSON.stringify(t)}function Zs({expression:t,inputs:e,outputs:s,target:a,hardware:n,options:r}){let i=Object.entries(e).map(([l,$])=>`        "${l}": ${zs($)},`),c=Object.entries({...s&&{outputs:s},...r}).map(([l,$])=>`    ${l}=${Yt($)},
`),p=Object.keys(e).map(l=>`"${l}": ${l}`).join(", ");return`import roller_svc

kernel = roller_svc.compile(
    ${Qs(t)},
    inputs={
${i.join(`
`)}
    },
    ${n?"hardware=spec,  # the changed spec: YAML or JSON text":`target=${JSON.stringify(a)}`},
${c.join("")})
results = kernel.run({${p}})`}var Ue=()=>location.protocol.startsWith("http")?location.origin:"$ROLLER_SERVER",ta=t=>`'${t.replaceAll("'","'\\''")}'`,Fe='-H "Authorization: Bearer $ROLLER_API_KEY"',ea=t=>`curl -s "${Ue()}/v1/kernels:compile" ${Fe} \\
  -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
  -d ${ta(JSON.stringify(t))}`,Je=(t,e)=>`curl -s "${Ue()}/v1/kernels/${t}/bundle?launcher=${e}" ${Fe} -o kernel.zip
unzip -q kernel.zip -d kernel`,sa=t=>`# with kernel/ in sys.path
import launch

results = launch.Kernel()(${Object.keys(t.inputs).map(e=>`${e}=${e}`).join(", ")})`,Tt=t=>(e,s)=>`${Je(e,t)}

${sa(s)}`,We=(t,e)=>(s,a,n)=>`${Je(s,"cpp")}

#include "kernel/${t}"
${e(n)}`,aa={ctypes:Tt("ctypes"),torch:Tt("torch"),"c++":We("kernel.h",t=>`// ${t}_run(...) takes the addresses of inputs and results`)},oa={cupy:Tt("cupy"),torch:Tt("torch"),"c++":We("launch.hpp",t=>`${t}_launcher kernel;  // then kernel.load(image) and kernel.launch(addresses..., stream)`)};function Ve(t,e){let s={python:Zs(t),curl:ea(t)};if(!e)return s;let a=e.launches[0].name.replace(/_kernel\d+$/,""),n=Object.entries(e.language==="c"?aa:oa);return{...s,...Object.fromEntries(n.map(([r,i])=>[r,i(e.digest,t,a)]))}}function na(){let[t,e]=_("python"),[s,a]=_(!1),n=Ve(K.value,W.value),r=n[t]??n.python,i=async()=>{await navigator.clipboard.writeText(r),a(!0),setTimeout(()=>a(!1),1500)};return o`<div class="launch"><h3>Use it</h3>
    <div class="choices">${Object.keys(n).map(c=>o`<button aria-pressed=${c===t} onClick=${()=>e(c)}>${c}</button>`)}<button onClick=${i}>${s?"copied":"copy"}</button></div>
    <pre data-testid="launch-code" tabindex="0">${r}</pre></div>`}var Ye=te(null),ra=()=>Promise.all([import("./code-L52SIGME.js"),import("./compare-CNOKAHN2.js")]).then(([{Code:t},{Compare:e}])=>Ye.value={Code:t,Compare:e});function ia({kernel:t}){let e=Ye.value;return e?o`<${e.Code} kernel=${t} /><${e.Compare} kernel=${t} />`:void ra()}function la({kernel:t}){let[e]=t.resources,[s]=t.launches,a=[s&&`${M(t.launches.length,"launch").replace("launchs","launches")}`,t.language!=="c"&&s&&`grid ${s.grid.join("×")}, block ${s.block.join("×")}`,e?.registers_per_thread>0&&`${e.registers_per_thread} registers`,e?.shared_bytes>0&&`${w(e.shared_bytes)} shared`,e?.spill_bytes>0&&`spills ${w(e.spill_bytes)}`].filter(Boolean);return o`<p class="quiet">${a.join(" · ")} · <a class="mono" href=${`/k/${t.digest}`}>${t.digest.slice(0,19)}</a></p>
    ${h.value&&yt.value<0&&o`<p class="note">The kernel is none of the programs above.</p>`}
    ${t.notes.map(n=>o`<p class="note">${n}</p>`)}
    <${ia} kernel=${t} />`}function Xt(){let t=W.value;return o`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    ${t?o`<${la} kernel=${t} />`:o`<p class="quiet">Not compiled: all of the above is the model's word. Compile builds the chosen program.</p>`}
    ${J.value&&o`<${na} />`}</section>`}var X=460,z=280,at=54,it=34,Xe=14,lt=14;function ca({terms:t,operations:e}){let s=t.filter(n=>n.unit==="operations").sort((n,r)=>r.amount-n.amount),a=t.find(n=>n.name==="compute");return s[0]?.rate??(a&&e.executed/a.seconds)}function ze(){let{device:t}=h.value,e=C.value,s=e.operations.executed,a={name:e.program.unit,rate:ca(e)},n=t.levels.filter(r=>r.name!==t.tile_levels[1]).map(r=>({level:r,term:e.terms.find(i=>i.name===r.name&&i.unit==="B"&&i.amount>0)})).filter(({term:r})=>r).map(({level:r,term:i})=>({name:r.name,rate:i.rate,moved:i.amount,intensity:s/i.amount,assumed:i.source==="assumed",fill:O(t,r.name)}));return{kernel:e,operations:s,unit:a,levels:n,reached:s/e.seconds}}function Qe(){let{unit:t,levels:e,reached:s}=ze();if(!e.length||!(t.rate>0)||!(s>0))return null;let a=t.rate,n=e.flatMap(u=>[u.intensity,a/u.rate]),r=Math.min(...n)/4,i=Math.max(...n)*4,c=Math.max(a,s)*2.5,p=Math.min(s,a/30)/4,l=u=>at+(X-at-lt)*Math.log(u/r)/Math.log(i/r),$=u=>z-it-(z-it-Xe)*Math.log(u/p)/Math.log(c/p),y=`${A(s,"operations")} of ${A(a,"operations")}: `+e.map(u=>`${u.name} ${pt(u.intensity)} op per byte`).join(", ");return o`<figure class="roofline"><svg viewBox=${`0 0 ${X} ${z}`} data-testid="roofline" role="img" aria-label=${y}>
    ${Et(r,i).map(u=>o`<line x1=${l(u)} x2=${l(u)} y1=${Xe} y2=${z-it} class="grid" />
      <text x=${l(u)} y=${z-it+13} class="tick" text-anchor="middle">${u<1?u.toPrecision(1):dt(u)}</text>`)}
    ${Et(p,c).map(u=>o`<line x1=${at} x2=${X-lt} y1=${$(u)} y2=${$(u)} class="grid" />
      <text x=${at-5} y=${$(u)+3} class="tick" text-anchor="end">${D(u,"").trim()}</text>`)}
    <text x=${(at+X)/2} y=${z-4} class="label" text-anchor="middle">operations per byte of a level</text>
    <text x=${-(z-it)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">operations per second</text>
    <line x1=${l(Math.max(r,a/Math.max(...e.map(u=>u.rate))))} x2=${X-lt} y1=${$(a)} y2=${$(a)} class="roof" />
    <text x=${X-lt} y=${$(a)-4} class="tick strong" text-anchor="end">${t.name} ${A(a,"operations")}</text>
    ${e.map(u=>{let f=Math.max(r,p/u.rate),m=Math.min(i,a/u.rate);return o`<line x1=${l(f)} y1=${$(f*u.rate)} x2=${l(m)} y2=${$(m*u.rate)} style=${`stroke:${u.fill};stroke-width:2`} />`})}
    <line x1=${at} x2=${X-lt} y1=${$(s)} y2=${$(s)} class="reached" />
    ${e.map(u=>o`<line x1=${l(u.intensity)} x2=${l(u.intensity)} y1=${$(s)} y2=${$(Math.min(a,u.intensity*u.rate))} style=${`stroke:${u.fill}`} class="headroom" />
      <circle cx=${l(u.intensity)} cy=${$(s)} r="5.5" style=${`fill:${u.fill}`}><title>${u.name}: ${w(u.moved)}, ${pt(u.intensity)} op/B</title></circle>`)}
  </svg><figcaption>A dot is below its own line by the bandwidth that its level leaves unused.</figcaption></figure>`}function Ze(){let{kernel:t,operations:e,unit:s,levels:a}=ze(),n=(r,i)=>v(r/i/t.seconds);return o`<table class="levels"><thead><tr><th>level</th><th class="r">moves</th><th class="r">op/B</th><th class="r">busy</th></tr></thead><tbody>
    ${a.map(r=>o`<tr><th scope="row"><i class="dot" style=${`--c:${r.fill}`}></i>${r.name}${r.assumed?o`<small title="the rate is assumed, not measured"> ?</small>`:""}</th>
      <td class="r">${w(r.moved)}</td><td class="r">${pt(r.intensity)}</td><td class="r">${n(r.moved,r.rate)}</td></tr>`)}
    ${s.rate>0&&o`<tr><th scope="row"><i class="dot" style="--c:var(--compute)"></i>${s.name}</th><td class="r" colspan="2">${D(e,"operations")}</td><td class="r">${n(e,s.rate)}</td></tr>`}
  </tbody></table>`}var ss=.01,$a=5,ts={exposed:"first loads, last results, and what overlaps imperfectly"},es=t=>t.reduce((e,s)=>e+x(s),0),ct=({name:t})=>o`<i class="dot" style=${`--c:${O(h.value.device,t)}`}></i>`;function ua({amount:t,unit:e,rate:s,source:a}){return e!=="B"&&e!=="operations"?"":`${D(t,e)} at ${A(s,e)}${a==="assumed"?" (assumed)":""}, `}function da(t){let[e,s]=rt(t);if(e){let[r,...i]=e.terms,c=i.length?`${g(x(r))} of ${g(e.seconds)}, to which ${i.map(p=>p.name).join(", ")} add`:`${ua(r)}${g(e.seconds)}`;return o`<li><${ct} name=${r.name} /><b>${r.name} takes longest</b>: ${c}.
      ${s&&` ${s.name} beside it would be done after ${g(s.seconds)}.`}</li>`}let[a,n]=Jt(t).sort((r,i)=>x(i)-x(r));return a?o`<li><${ct} name=${a.name} /><b>Mostly ${a.name}</b>: ${v(x(a)/t.seconds)} of the time${n&&`, then ${n.name} with ${v(x(n)/t.seconds)}`}. These terms add up.</li>`:null}function pa({name:t,unit:e}){return e==="B"?`${t} bandwidth`:Qt.includes(t)&&e==="operations"?"arithmetic rate":"issue rate"}function ma({limited_by:t=[]},e){let[s]=t,a=rt(e)[0]?.terms[0];if(!a||!s||s.saved<ss)return null;let n=pa(a),r=t.find(i=>i.resource===n)??{resource:n,saved:0};return s===r||s.saved<2*r.saved?null:o`<li><${ct} name=${s.resource.split(" ")[0]} /><b>But ${s.resource} limits</b>: 10 % more of it saves ${v(s.saved)},
    10 % more ${r.resource} ${r.saved<5e-4?"nothing":`only ${v(r.saved)}`}.</li>`}function fa(t){let e=Q(t),s=e.flatMap(Jt);if(!e.some(r=>rt(r).length)||es(s)<ss*t.seconds)return null;let a=new Map;for(let r of s)a.set(r.name,(a.get(r.name)??0)+x(r));let n=[...a].map(([r,i])=>`${r} ${g(i)}${ts[r]?` (${ts[r]})`:""}`).join(", ");return o`<li><${ct} name="exposed" />Not hidden: ${n}. That is ${v(es(s)/t.seconds)} of the time.</li>`}function ha({operations:t,view:e}){let s=t.executed/t.definition;return Math.abs(s-1)>.02?o`<li><${ct} name="compute" />${Vt.includes(e??"")?"It":e} executes ${D(t.executed,"operations")}, ${v(s)} of the${" "}
    ${D(t.definition,"operations")} of the definition.</li>`:null}function ga(t){let e=nt(t);return e.length?o`<li data-testid="once"><i class="dot" style="--c:var(--ink-3)"></i>Once, before all calls: ${g(e.reduce((s,a)=>s+a.seconds,0))}${" "}
    of ${e.map(s=>s.group).join(", ")}, of constants alone. No call has it.</li>`:null}function ba(t,e){return e?o`<li><i class="dot" style="--c:var(--ink-3)"></i>No tiles go below ${g(e.seconds)}${" "}
    (${e.arithmetic_seconds>e.traffic_seconds?`${D(e.operations,"operations")} on ${e.unit}`:`${w(e.bytes)} once through ${e.level}`}):${" "}
    this is ${F(t.seconds/e.seconds)} that.</li>`:null}function va(t){let e=W.value?.measurement?.median_s;if(!e)return null;let s=t.seconds/e-1;return o`<li><i class="dot" style="--c:var(--good)"></i>Measured ${g(e)}: the estimate is ${v(Math.abs(s))} ${s>0?"high":"low"}.</li>`}function ya({resources:t}){if(!t)return o`<p class="quiet" data-testid="sensitivity">What more of each resource saves is known of the first program.</p>`;let e=t.filter(s=>s.saved>5e-4).slice(0,$a);return o`<div data-testid="sensitivity"><h3>10 % more of … saves</h3>
    ${e.map(({resource:s,saved:a})=>o`<div class="saves"><span>${s}</span>
      <svg height="8" width="100%" aria-hidden="true"><rect width=${`${Math.min(100,1e3*a)}%`} height="8" style=${`fill:${O(h.value.device,s.split(" ")[0])}`} /></svg>
      <em>${(100*a).toFixed(1)} %</em></div>`)}
    ${!e.length&&o`<p class="quiet">Nothing above 0.05 %.</p>`}</div>`}function as(){let{device:t,floor:e}=h.value,s=me.value,a=C.value,n=Q(s),r=[["bound",o`<span style=${`color:${q(t,s.bound)}`}>${s.bound}</span>`],e&&["above the floor",F(s.seconds/e.seconds)],["rate",A(ie(s)/s.seconds,"operations")],["waves",a.waves],["occupancy",v(a.occupancy)],s.uncertainty&&["true within",F(s.uncertainty)]].filter(Boolean);return o`<section class="panel verdict" aria-labelledby="verdict-title" data-testid="verdict">
    <h2 class="unseen" id="verdict-title">Verdict</h2>
    <div class="headline"><p class="big" data-testid="estimate">${g(s.seconds)}</p>
      <dl>${r.map(([i,c])=>o`<div><dt>${i}</dt><dd>${c}</dd></div>`)}</dl></div>
    <${_t} kernels=${n} device=${t} longest=${s.seconds} height=${26} />
    <${Ke} kernels=${n} device=${t} />
    <div class="why"><div>
        <ul class="sentences">${da(a)}${ma(s,a)}${fa(s)}${ha(a)}${ga(s)}${ba(s,e)}${S.value===yt.value&&va(s)}</ul>
        <div class="facts"><${ya} resources=${s.limited_by} /><${Ze} /></div></div>
      <${Qe} /></div>
  </section>`}var xa=()=>o`<svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
  <rect width="18" height="18" rx="2" style="fill:var(--outer)" />
  <rect width="12" height="12" style="fill:var(--block)" />
  <rect width="6" height="6" style="fill:var(--thread)" />
</svg>`,wa=[["Kernel","/"],["Model","/m"],["Farm","/farm"]],St=/^\/m(\/|$)/.test(location.pathname)?"/m":location.pathname==="/farm"?"/farm":"/";function ka({address:t}){let[e,s]=_(!1),a=async r=>{navigator.clipboard&&(r.preventDefault(),await navigator.clipboard.writeText(new URL(t.value,location.href).href),s(!0),setTimeout(()=>s(!1),1500))},n=Rt.value==="dark"?"light":"dark";return o`<header class="top">
    <a class="brand" href="/"><${xa} /><b>roller</b></a>
    <nav aria-label="pages">${wa.map(([r,i])=>o`<a href=${i} aria-current=${i===St?"page":null}>${r}</a>`)}</nav>
    <a class="link" data-testid="permalink" href=${t.value} onClick=${a}>${e?"copied":"copy link"}</a>
    <button class="theme" onClick=${()=>Rt.value=n}>${n}</button>
  </header>`}function Ma(){let t=bt.value&&o`<p class="note" data-testid="remark">${bt.value}</p>`;return!h.value&&W.value?o`${t}<${Xt} />`:h.value?o`${T.value&&!bt.value&&o`<p class="note">Below is the last program ${wt.value?"without errors":"that was explained"}.</p>`}${t}<${as} /><${Ae} /><${Ge} /><${Xt} />`:o`<p class="waiting" role="status">${T.value?"":"Constructing tiles…"}</p>`}var Oa=()=>o`<main class="kernel"><h1 class="unseen">Why this tile</h1><${Re} /><div class=${["work",T.value&&"old",tt.value&&"waits"].filter(Boolean).join(" ")} aria-busy=${tt.value}><${Ma} /></div></main>`,Ct=St==="/m"?await import("./modelpage-ULU73KRO.js"):St==="/farm"?await import("./farm-HNRDHIUL.js"):{Page:Oa,address:fe,load:Oe};document.title={"/":"roller: see why this tile","/m":"roller: a model","/farm":"roller: the build farm"}[St];var _a=()=>o`<${De} /><${ka} address=${Ct.address} /><${qe} load=${Ct.load} /><${Ct.Page} />`;Ct.load();zt(o`<${_a} />`,document.getElementById("app"));
