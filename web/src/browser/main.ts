import { mount } from "svelte";
import "../app.css";
import Browser from "./Browser.svelte";

mount(Browser, { target: document.getElementById("app")! });
